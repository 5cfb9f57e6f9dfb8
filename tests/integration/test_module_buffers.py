"""Buffers of native models that are no moving statistics are each replica's own, also in checkpoints."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import isotrain
from isotrain.testing.consecutive_sessions import launched_in_turn

pytestmark = pytest.mark.slow

BATCH, SAMPLES = 4, 9
SHARES = ([0, 1, 4, 5, 8], [2, 3, 6, 7])
"""The rows that each of two replicas is given: of the last global batch, one has none."""


def network() -> Any:
    import torch
    from torch import nn

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.dense = nn.Linear(3, 1)
            self.register_buffer("seen", torch.zeros(()))
            self.register_buffer("running_level", torch.zeros(()))
            self.register_buffer("mask", torch.tensor([0.1, 0.3, -torch.inf]))

        def forward(self, inputs: Any) -> Any:
            if self.training:
                self.seen += inputs.sum()
                self.running_level.copy_(inputs.mean())
            return self.dense(inputs) + self.mask.exp().sum()

    return Net()


def samples() -> tuple[np.ndarray, np.ndarray]:
    draw = np.random.default_rng(4)
    inputs = draw.integers(0, 16, (SAMPLES, 3)) / 16
    return inputs.astype("f4"), draw.standard_normal((SAMPLES, 1)).astype("f4")


SPEC = {
    "model": {"torch": network},
    "data": samples,
    "loss": "mse",
    "optimizer": {"name": "sgd", "lr": 0.125},
    "global_batch_size": BATCH,
    "shuffle": False,
    "epochs": 1,
    "threads": 1,
}


def trained(session: isotrain.Session, name: str, folder: Path) -> list[Any]:
    """The buffers, once they were saved, changed, and restored; and the notes."""
    for batch in session.batches():
        session.step(batch)
    session.save(folder / session.plan.backend)
    buffers = dict(session.group.model.named_buffers())
    for buffer in buffers.values():
        buffer.fill_(7)
    session.restore(folder / session.plan.backend)
    return [{name: buffer.numpy() for name, buffer in buffers.items()}, session.setup_notes()]


@pytest.mark.parametrize("backend", ["torch-ddp", "horovod-torch"])
def test_each_replica_keeps_the_buffers_of_its_own_passes(backend: str, tmp_path: Path) -> None:
    work = functools.partial(trained, folder=tmp_path)
    results = [rank["only"] for rank in launched_in_turn({"only": SPEC}, work, backend, 2)]
    inputs, _ = samples()
    for rows, (buffers, notes) in zip(SHARES, results, strict=True):
        assert buffers["seen"] == inputs[rows].sum()
        assert buffers["running_level"] == inputs[-1].mean()
        np.testing.assert_array_equal(buffers["mask"], np.float32([0.1, 0.3, -np.inf]))
        assert any("seen, mask: each replica keeps" in note for note in notes)
