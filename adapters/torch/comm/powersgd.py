"""PowerSGD gradient compression: torch's DDP communication hook, and its state for checkpoints."""

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
_STATE_DICTS = {"residual": "error_dict", "left": "p_memory_dict", "right": "q_memory_dict"}


class PowerSGD:
    """torch's PowerSGD hook with its state: steps done; per bucket the error feedback, P and Q."""

    def __init__(self, rank: int, start: int) -> None:
        """Creates the hook, with an empty state.

        Args:
            rank: Rank of the matrix approximation.
            start: Uncompressed steps before compression begins.
        """
        self.state = powerSGD_hook.PowerSGDState(
            None,
            matrix_approximation_rank=rank,
            start_powerSGD_iter=start,
            min_compression_rate=1,  # compress whatever becomes smaller
            random_seed=_SEED,
        )

    @staticmethod
    def hook(state, bucket):  # type: ignore[no-untyped-def]  # DDP refuses annotations that are strings
        """DDP communication hook: compresses one bucket, and returns a future of its tensor. Collective.

        torch's own hook starts two of its three all-reduces in callbacks, which run in threads. It is waited
        for, so that each rank starts all of them in one order: Gloo matches collectives by their order.
        """
        future = powerSGD_hook.powerSGD_hook(state, bucket)
        if state.iter >= state.start_powerSGD_iter:
            future.wait()
        return future

    def read(self) -> dict[str, torch.Tensor]:
        """State by name: `steps`, an int64 scalar, and `KIND/BUCKET`, the tensors of each bucket."""
        tensors = {_STEPS: torch.tensor(self.state.iter)}
        for kind, attribute in _STATE_DICTS.items():
            for bucket, tensor in sorted(getattr(self.state, attribute).items()):
                tensors[f"{kind}/{bucket}"] = tensor
        return tensors

    def write(self, name: str, value: torch.Tensor, device: torch.device) -> None:
        """Restores one entry of `read`, in its shape; it need not exist yet.

        Raises:
            IsotrainError: There is no state of that name.
        """
        kind, _, bucket = name.partition("/")
        if name == _STEPS:
            self._set_step(int(value))
        elif kind in _STATE_DICTS and bucket.isdecimal():
            getattr(self.state, _STATE_DICTS[kind])[int(bucket)] = value.to(device)
        else:
            raise IsotrainError(unknown_name("PowerSGD state", name, (_STEPS, *_STATE_DICTS)))

    def _set_step(self, steps: int) -> None:
        """Sets the steps done; before compression begins there are no factors, and no error feedback."""
        self.state.iter = steps
        if steps <= self.state.start_powerSGD_iter:
            self.state.rng = np.random.RandomState(_SEED)
            for attribute in _STATE_DICTS.values():
                getattr(self.state, attribute).clear()

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Context in which gradients are all-reduced uncompressed, and the state does not change."""
        steps, self.state.iter = self.state.iter, 0
        try:
            yield
        finally:
            self.state.iter = steps


def _probe_state() -> None:
    powersgd = PowerSGD(1, 2)
    require(int(powersgd.read()[_STEPS]) == 0, "the steps in `iter`, from 0 on")
    for kind in _STATE_DICTS:
        powersgd.write(f"{kind}/0", torch.ones(1), torch.device("cpu"))
    require(len(powersgd.read()) == 1 + len(_STATE_DICTS), "the state of each bucket")
    powersgd.write(_STEPS, torch.tensor(1), torch.device("cpu"))
    require(len(powersgd.read()) == 1, "no state before compression begins")
    require(isinstance(powersgd.state.rng, np.random.RandomState), "NumPy's generator in `rng`")


PROBES = (PrivateApiProbe("PowerSGDState's attributes", _probe_state),)
"""Probes of undocumented parts of torch, besides those of `torch.base.private_api`."""
