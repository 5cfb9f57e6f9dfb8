"""Local steps of torch wait for no other replica, and their losses are those of the global batch."""

from __future__ import annotations

import itertools
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.waiting import wait_until

import isotrain

_LIMIT_SECONDS = 60.0
_STEPS = 6
_INPUTS = np.random.default_rng(5).normal(size=(8 * _STEPS, 5))


def model() -> Any:
    from torch import nn

    return nn.Linear(5, 1)


def data() -> Any:
    return _INPUTS, _INPUTS[:, :1] ** 2


def spec(strategy: str) -> dict[str, Any]:
    """Batches of 8 in one epoch."""
    return {
        "model": {"torch": model},
        "data": data,
        "loss": "mse",
        "optimizer": {"name": "sgd", "lr": 0.125},
        "global_batch_size": 8,
        "epochs": 1,
        "precision": "float64",
        "strategy": {"name": strategy, "options": {"every": 4}},
        "threads": 1,
    }


def losses_apart(session: isotrain.Session, ahead: Path) -> list[float]:
    """Losses that are read at the end; the other replica takes its second step after the first's third."""
    found = []
    for batch in itertools.islice(session.batches(), _STEPS):
        if session.rank and batch.step == 1:
            wait_until(ahead.exists, _LIMIT_SECONDS)
        found.append(session.step(batch))
        session.log({"same": found[-1]})
        if not session.rank and batch.step == 2:
            ahead.touch()
    return list(map(float, found))


def losses_at_once(session: isotrain.Session) -> list[float]:
    """Losses that are read right after their steps."""
    return [float(session.step(batch)) for batch in session.batches()]


@pytest.mark.features
@pytest.mark.parametrize("strategy", ["local-sgd", "diloco", "gossip", "elastic-averaging"])
def test_local_steps_wait_for_no_other_replica(tmp_path: Path, strategy: str) -> None:
    """Their losses, those of the history too, are to the bit those of steps that were waited for."""
    options = {"backend": "torch-ddp", "replicas": 2}
    apart = partial(losses_apart, ahead=tmp_path / "ahead")
    first, other = isotrain.launch(apart, spec(strategy), output=tmp_path / "apart", **options)
    expected, _ = isotrain.launch(
        losses_at_once, spec(strategy), output=tmp_path / "at-once", **options
    )
    assert len(set(expected)) == _STEPS
    assert first == other == expected
    result = isotrain.run(spec(strategy), output=tmp_path / "run", quiet=True, **options)
    assert result.history.loss == expected
