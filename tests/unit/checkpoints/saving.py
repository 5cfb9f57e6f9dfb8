"""Checkpoints of two writers, of which it can be told whether they are of one piece."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np

from isotrain.core.checkpoints.folder import CheckpointFolder
from isotrain.core.checkpoints.tensor_part import TensorPart


def save(location: str | Path, step: int, value: int, token: str) -> None:
    """Saves a checkpoint, all of whose numbers are `value`, and removes the others."""
    folder = CheckpointFolder(location)
    for writer in range(2):
        part = TensorPart(np.full((1, 3), value), global_shape=(2, 3), offset=(writer, 0))
        own = {"r": TensorPart(np.full(2, value, "float32"), "bfloat16")}
        state = {"w": part, f"b{writer}": TensorPart(np.array(value))}
        sections = {"state": state, f"replica-{writer}": own}
        folder.write(step, token=token, writer=writer, sections=sections)
    folder.commit(step, token=token, writers=2, run={"value": value}, timeout_s=0.0)
    folder.prune(keep_last=1)


def newest(location: str | Path) -> tuple[int, int]:
    """Step and value of the newest checkpoint, all of which is read."""
    checkpoint = CheckpointFolder(location).newest()
    assert checkpoint is not None
    checkpoint.verify()
    arrays = [*checkpoint.read("state").values()]
    arrays += [checkpoint.read(f"replica-{writer}")["r"] for writer in range(2)]
    found = {checkpoint.run["value"], *itertools.chain.from_iterable(a.flat for a in arrays)}
    assert len(found) == 1, "it has been put together from several"
    return checkpoint.step, int(found.pop())
