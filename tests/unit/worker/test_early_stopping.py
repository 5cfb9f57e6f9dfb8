"""The best epoch of a run that continues."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from isotrain.core.spec.checkpoint_policy import CheckpointPolicy
from isotrain.core.worker.early_stopping import BestEpochTracker


@pytest.mark.parametrize(("best_step", "is_best"), [(3, False), (None, True)])
def test_a_best_value_counts_while_its_checkpoint_exists(
    best_step: int | None, is_best: bool
) -> None:
    spec = SimpleNamespace(
        checkpoint=CheckpointPolicy(keep_best={"metric": "loss"}),
        early_stopping=None,
        updates=None,
        monitored_metrics=["loss"],
        evaluation=SimpleNamespace(every_epochs=0, every_steps=0),
    )
    notes: dict[str, Any] = {"names of metrics": ["loss"]}
    session: Any = SimpleNamespace(spec=spec, notes=notes, best_step=None, steps_done=3)
    assert BestEpochTracker(session).update({"loss": 1.0})
    session.best_step = best_step
    assert BestEpochTracker(session).update({"loss": 2.0}) == is_best
