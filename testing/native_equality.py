"""Native equality: isotrain's weights against those of a training loop in the framework alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, cast

import numpy as np

from isotrain.core.contracts.backend.replica import Tensor
from isotrain.core.contracts.state import StateKind
from isotrain.core.data.batch import Batch
from isotrain.core.session.session import Session
from isotrain.core.worker.fit import fit
from isotrain.testing.consecutive_sessions import launched_in_turn

Weights = Mapping[str, np.ndarray]
Loop = Callable[[Weights], Weights]
"""Training loop in the framework alone: takes the start weights, returns the final weights, by name."""


def trained(spec: Mapping[str, Any], backend: str, replicas: int) -> dict[str, Any]:
    """Trains with isotrain; results of rank 0.

    Returns:
        `start` and `weights`, arrays by name, and `loss`, the losses of every step.

    Raises:
        AssertionError: The run failed, or its processes end with different weights.
    """
    return trained_in_turn({"": spec}, backend, replicas)[""]


def trained_in_turn(
    specs: Mapping[str, Mapping[str, Any]], backend: str, replicas: int
) -> dict[str, dict[str, Any]]:
    """Trains several specs one after the other in one run; the results of `trained` by spec name.

    Raises:
        AssertionError: The run failed, or its processes have different losses, or end with different weights.
    """
    by_rank = launched_in_turn(specs, train, backend, replicas)
    main: dict[str, dict[str, Any]] = by_rank[0]
    for rank, other in enumerate(by_rank):
        for name, results in main.items():
            same = other[name]["loss"] == results["loss"]
            assert same, f"{name} rank {rank} has other losses".lstrip()
            for weight, value in results["weights"].items():
                same = np.array_equal(value, other[name]["weights"][weight])
                assert same, f"{name} rank {rank} differs in {weight}".lstrip()
    return main


class _LossRecorder:
    """Session that records the loss of every step.

    Rank 0 alone reads each loss at once: reading must be allowed on any rank.
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        self.losses: list[Tensor] = []

    def step(self, batch: Batch) -> Tensor:
        """Takes a step of the session and records its loss, a scalar. Collective."""
        self.losses.append(self._session.step(batch))
        if self._session.is_main:
            float(self.losses[-1])
        return self.losses[-1]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._session, name)


def train(session: Session, name: str = "") -> dict[str, Any]:
    """Trains the spec of this name with the built-in loop. The function that each rank runs.

    Returns:
        `start` and `weights` of this process, arrays by name, and the `loss` of every step.
    """
    kinds: tuple[StateKind, ...] = ("trainable", "non-trainable")
    start, recorder = session.read_state(kinds), _LossRecorder(session)
    fit(cast(Session, recorder))
    losses = [float(loss) for loss in recorder.losses]
    return {"start": start, "loss": losses, "weights": session.read_state(kinds)}


def assert_native_equality(ours: Mapping[str, Any], loop: Loop) -> None:
    """Asserts that the weights equal those of a native training loop to the bit.

    Args:
        ours: Results of `trained`.
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
    unchanged = [n for n, v in ours["weights"].items() if np.array_equal(v, ours["start"][n])]
    assert not unchanged, f"not trained at all: {unchanged}"
