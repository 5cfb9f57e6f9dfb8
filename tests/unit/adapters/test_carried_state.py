"""State in module attributes: arrays that other attributes view, and those that are taken for constants."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torch import nn

from isotrain.adapters.torch.trainer.carried_state import Carry


class Module(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.array = np.zeros(4)
        self.view = self.array[1:]
        self.table = np.zeros(2**21 + 1)  # float64


def carry_of(module: nn.Module) -> Carry:
    return Carry({"": module}, {}, torch.device("cpu"))


def test_a_restored_array_is_still_viewed_by_others() -> None:
    saved, module = Module(), Module()
    carry = carry_of(saved)
    saved.array += 3
    state = dict(carry.section().read())
    section = carry_of(module).section()
    for name in ("array:array", "view:array"):
        section.write(name, state[name])
    module.array += 1
    np.testing.assert_array_equal(module.view, [4, 4, 4])


def test_large_arrays_and_memory_maps_are_constants(tmp_path: Path) -> None:
    module = Module()
    np.zeros(4).tofile(tmp_path / "numbers")
    module.mapped = np.memmap(tmp_path / "numbers", mode="r+")
    carry = carry_of(module)
    restore = carry.savepoint()
    for array in (module.array, module.table, module.mapped):
        array += 1
    assert set(carry.section().read()) == {"array:array", "view:array"}
    restore()
    assert (module.array[0], module.table[0], module.mapped[0]) == (0, 1, 1)
