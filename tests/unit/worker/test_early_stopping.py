"""The best value of a metric over epochs, which decides on the best checkpoint and on early stopping."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest

from isotrain.core.spec.checkpoint_policy import MonitoredMetric
from isotrain.core.worker.early_stopping import BestMetric

NAN, INFINITY = float("nan"), float("inf")


def best_loss(notes: dict[str, Any], min_delta: float = 0.0) -> BestMetric:
    """The best validation loss of a run with these session notes."""
    session: Any = SimpleNamespace(notes=notes)
    return BestMetric(session, "best", MonitoredMetric(metric="validation_loss"), min_delta)


def improvements(
    best: BestMetric, values: list[float], name: str = "validation_loss"
) -> list[bool]:
    """Whether each epoch's value is the best so far."""
    return [best.update({name: value}) for value in values]


@pytest.mark.parametrize(
    ("values", "is_best"),
    [
        ([3.0, 2.0, 4.0, 1.0], [True, True, False, True]),
        ([2.0, 2.0, 1.0, 1.0], [True, False, True, False]),
        ([NAN, 2.0, NAN, 1.0], [False, True, False, True]),
        ([INFINITY, INFINITY, 2.0, INFINITY], [True, False, True, False]),
    ],
    ids=["smaller", "equal", "nan", "infinite"],
)
def test_only_a_smaller_loss_is_better(values: list[float], is_best: list[bool]) -> None:
    assert improvements(best_loss({}), values) == is_best


def test_a_larger_accuracy_is_better() -> None:
    session: Any = SimpleNamespace(notes={})
    accuracy = BestMetric(session, "best", MonitoredMetric(metric="accuracy"), 0.0)
    found = improvements(accuracy, [0.5, 0.5, 0.25, 0.75], "accuracy")
    assert found == [True, False, False, True]


def test_an_improvement_is_larger_than_min_delta() -> None:
    assert improvements(best_loss({}, min_delta=0.5), [3.0, 2.5, 2.25]) == [True, False, True]


def test_epochs_since_the_best_are_the_evaluated_ones() -> None:
    loss = best_loss({})
    improvements(loss, [2.0, 3.0, NAN])
    loss.update({"loss": 0.0})
    assert loss.epochs_since_best == 2


def test_a_resumed_run_continues_from_its_notes() -> None:
    """Notes come back from JSON, in which an infinite number is a text."""
    notes: dict[str, Any] = {}
    improvements(best_loss(notes), [INFINITY, NAN])
    notes["best"]["value"] = json.loads(json.dumps(str(notes["best"]["value"])))
    resumed = best_loss(notes)
    assert resumed.epochs_since_best == 1
    assert improvements(resumed, [NAN, 5.0]) == [False, True]
