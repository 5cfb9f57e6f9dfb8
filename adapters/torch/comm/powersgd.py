"""PowerSGD as torch's own communication hook for DistributedDataParallel has it, and what that remembers."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import numpy as np
import torch
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook

from isotrain.adapters.common.private_api import PrivateApiProbe, require
from isotrain.plugin import IsotrainError, unknown_name

_SEED = 0
_STEPS = "steps"
_MEMORIES = {"residual": "error_dict", "left": "p_memory_dict", "right": "q_memory_dict"}


class PowerSGD:
    """The hook and its state: steps so far, and for each bucket its residual and both factors."""

    def __init__(self, rank: int, start: int) -> None:
        """Remembers nothing yet.

        Args:
            rank: Of the matrices that are sent.
            start: Uncompressed steps before it begins.
        """
        self.hook = powerSGD_hook.powerSGD_hook
        self.state = powerSGD_hook.PowerSGDState(
            None,
            matrix_approximation_rank=rank,
            start_powerSGD_iter=start,
            min_compression_rate=1,  # whatever becomes smaller
            random_seed=_SEED,
        )

    def read(self) -> dict[str, torch.Tensor]:
        """What it remembers, by name."""
        found = {_STEPS: torch.tensor(self.state.iter)}
        for kind, attribute in _MEMORIES.items():
            for bucket, tensor in sorted(getattr(self.state, attribute).items()):
                found[f"{kind}/{bucket}"] = tensor
        return found

    def write(self, name: str, value: torch.Tensor, device: torch.device) -> None:
        """Sets one of these, which need not be there yet.

        Raises:
            IsotrainError: It remembers nothing of that name.
        """
        kind, _, bucket = name.partition("/")
        if name == _STEPS:
            self._go_to(int(value))
        elif kind in _MEMORIES and bucket.isdecimal():
            getattr(self.state, _MEMORIES[kind])[int(bucket)] = value.to(device)
        else:
            raise IsotrainError(unknown_name("memory of PowerSGD", name, (_STEPS, *_MEMORIES)))

    def _go_to(self, steps: int) -> None:
        """Sets the steps so far; before its start it has drawn no factors, and remembers nothing."""
        self.state.iter = steps
        if steps <= self.state.start_powerSGD_iter:
            self.state.rng = np.random.RandomState(_SEED)
            for attribute in _MEMORIES.values():
                getattr(self.state, attribute).clear()

    @contextlib.contextmanager
    def set_aside(self) -> Iterator[None]:
        """Within it, gradients travel as before its start; it remembers nothing of them."""
        steps, self.state.iter = self.state.iter, 0
        try:
            yield
        finally:
            self.state.iter = steps


def _remembers() -> None:
    memory = PowerSGD(1, 2)
    require(int(memory.read()[_STEPS]) == 0, "its steps in `iter`, from 0 on")
    for kind in _MEMORIES:
        memory.write(f"{kind}/0", torch.ones(1), torch.device("cpu"))
    require(len(memory.read()) == 1 + len(_MEMORIES), "what it remembers of each bucket")
    memory.write(_STEPS, torch.tensor(1), torch.device("cpu"))
    require(len(memory.read()) == 1, "nothing that it remembers before it begins")
    require(isinstance(memory.state.rng, np.random.RandomState), "NumPy's generator in `rng`")


PROBES = (PrivateApiProbe("PowerSGDState's attributes", _remembers),)
"""Parts of torch that it does not document, besides those of `private`."""
