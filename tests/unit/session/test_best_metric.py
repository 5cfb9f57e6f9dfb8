"""The best value of a metric over epochs: the best checkpoint, early stopping and plateaus go by it."""

from __future__ import annotations

import json
from typing import Any

import pytest

from isotrain.core.session.training.best_metric import BestMetric
from isotrain.core.session.training.plateau import plateau_fraction
from isotrain.core.spec.checkpoint_policy import MonitoredMetric
from isotrain.core.spec.schedules import PlateauSchedule

NAN, INFINITY = float("nan"), float("inf")


def best_loss(notes: dict[str, Any], min_delta: float = 0.0) -> BestMetric:
    """The best validation loss of a run with these session notes."""
    return BestMetric(notes, "best", MonitoredMetric(metric="validation_loss"), min_delta)


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
    accuracy = BestMetric({}, "best", MonitoredMetric(metric="accuracy"), 0.0)
    found = improvements(accuracy, [0.5, 0.5, 0.25, 0.75], "accuracy")
    assert found == [True, False, False, True]


def test_an_improvement_is_larger_than_min_delta() -> None:
    assert improvements(best_loss({}, min_delta=0.5), [3.0, 2.5, 2.25]) == [True, False, True]


def test_evaluations_since_the_best_are_those_with_the_metric() -> None:
    loss = best_loss({})
    improvements(loss, [2.0, 3.0, NAN])
    loss.update({"loss": 0.0})
    assert loss.evaluations_since_best == 2
    improvements(loss, [1.0])
    assert loss.evaluations_since_best == 0


def test_a_resumed_run_continues_from_its_notes() -> None:
    """Notes come back from JSON, in which an infinite number is a text."""
    notes: dict[str, Any] = {}
    improvements(best_loss(notes), [INFINITY, NAN])
    notes["best"]["value"] = json.loads(json.dumps(str(notes["best"]["value"])))
    resumed = best_loss(notes)
    assert resumed.evaluations_since_best == 1
    assert improvements(resumed, [NAN, 5.0]) == [False, True]


LOSSES = [
    3.0,
    2.0,
    2.5,
    2.4,
    1.9999,
    2.1,
    2.0,
    NAN,
    2.2,
    1.0,
    1.1,
    1.2,
    1.3,
    1.4,
    1.5,
    1.6,
    1.7,
    1.8,
]
PLATEAUS = [
    {"patience": 1},
    {"patience": 2, "cooldown": 1, "factor": 0.5},
    {"patience": 3, "cooldown": 4, "min_delta": 0.75},
    {"patience": 1, "factor": 0.5, "min_fraction": 0.2},
]


@pytest.mark.parametrize("options", PLATEAUS)
def test_a_plateau_lowers_the_rate_as_torch_does(options: dict[str, Any]) -> None:
    torch = pytest.importorskip("torch")
    schedule = PlateauSchedule(**options)
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.5)
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(
        optimizer,
        factor=schedule.factor,
        patience=schedule.patience - 1,  # torch's: epochs that are still accepted
        cooldown=schedule.cooldown,
        threshold=schedule.min_delta,
        threshold_mode="abs",
        min_lr=schedule.min_fraction * 0.5,
        eps=0,
    )
    fraction, notes = 1.0, dict[str, Any]()
    for loss in LOSSES:
        scheduler.step(loss)
        metrics = {"validation_loss": loss, "loss": 0.0}
        fraction = plateau_fraction(schedule, metrics, notes, "plateau", fraction)
        assert 0.5 * fraction == pytest.approx(optimizer.param_groups[0]["lr"], rel=1e-12)
        notes = json.loads(json.dumps(notes))
    assert fraction < 1


def test_epochs_that_were_not_evaluated_change_no_rate() -> None:
    notes: dict[str, Any] = {}
    schedule = PlateauSchedule(patience=1)
    assert plateau_fraction(schedule, {"loss": 1.0}, notes, "plateau", 0.5) == 0.5
    assert notes == {}
