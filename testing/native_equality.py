"""Is a backend as good as the framework by itself? Its weights against those of a loop written by hand."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, cast

import numpy as np

from isotrain.core.contracts.replica import Tensor
from isotrain.core.contracts.state import StateKind
from isotrain.core.data.batch import Batch
from isotrain.core.session.session import Session
from isotrain.core.worker.fit import fit
from isotrain.testing.shared_runs import launched_in_turn

Weights = Mapping[str, np.ndarray]
Loop = Callable[[Weights], Weights]
"""Trains from the given weights, in the framework's own words, and gives the final ones."""


def trained(spec: Mapping[str, Any], backend: str, replicas: int) -> dict[str, Any]:
    """What process 0 has after isotrain's training: `start` and `weights` by name, `loss` of every step.

    Args:
        spec: What to train.
        backend: `NAME` or `NAME:COLLECTIVE`.
        replicas: How many.

    Raises:
        AssertionError: The run failed, or its processes end with different weights.
    """
    return trained_in_turn({"": spec}, backend, replicas)[""]


def trained_in_turn(
    specs: Mapping[str, Mapping[str, Any]], backend: str, replicas: int
) -> dict[str, dict[str, Any]]:
    """As `trained`, for several specs that one run's processes train one after the other.

    Args:
        specs: By a name that can be a folder's.
        backend: `NAME` or `NAME:COLLECTIVE`.
        replicas: How many.

    Raises:
        AssertionError: The run failed, or its processes have different losses, or end with different weights.
    """
    by_rank = launched_in_turn(specs, _train, backend, replicas)
    found: dict[str, dict[str, Any]] = by_rank[0]
    for rank, other in enumerate(by_rank):
        for name, own in found.items():
            same = other[name]["loss"] == own["loss"]
            assert same, f"{name} rank {rank} has other losses".lstrip()
            for weight, value in own["weights"].items():
                same = np.array_equal(value, other[name]["weights"][weight])
                assert same, f"{name} rank {rank} differs in {weight}".lstrip()
    return found


def _train(session: Session, name: str) -> dict[str, Any]:
    return train(session)


class _Noted:
    """A session that keeps the loss of every step; process 0 alone reads it at once, as anyone may."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self.losses: list[Tensor] = []

    def step(self, batch: Batch) -> Tensor:
        """As the session's."""
        self.losses.append(self._session.step(batch))
        if self._session.is_main:
            float(self.losses[-1])
        return self.losses[-1]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._session, name)


def train(session: Session) -> dict[str, Any]:
    """Trains with the built-in loop; a run's work.

    Returns:
        Of this process, `start` and `weights` by name, and the `loss` of every step.
    """
    kinds: tuple[StateKind, ...] = ("trainable", "non-trainable")
    start, noted = session.read_state(kinds), _Noted(session)
    fit(cast(Session, noted))
    losses = [float(loss) for loss in noted.losses]
    return {"start": start, "loss": losses, "weights": session.read_state(kinds)}


def assert_native_equality(ours: Mapping[str, Any], loop: Loop) -> None:
    """The weights are equal to the bit to those of a loop written by hand.

    Args:
        ours: What `trained` gave.
        loop: The same training without isotrain: same data, order, model and optimizer.
    """
    theirs = loop(ours["start"])
    assert set(ours["weights"]) == set(theirs), f"{sorted(ours['weights'])} != {sorted(theirs)}"
    differ = {
        name: float(np.abs(value - theirs[name]).max())
        for name, value in ours["weights"].items()
        if not np.array_equal(value, theirs[name])
    }
    assert not differ, f"largest differences: {differ}"
    still = [n for n, v in ours["weights"].items() if np.array_equal(v, ours["start"][n])]
    assert not still, f"not trained at all: {still}"
