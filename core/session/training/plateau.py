"""Reduction of the learning rate on a plateau of a metric."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from isotrain.core.session.training.best_metric import BestMetric
from isotrain.core.spec.schedules import PlateauSchedule

_PLATEAU = "plateau"


def plateau_factor(
    schedule: PlateauSchedule, metrics: Mapping[str, float], notes: dict[str, Any]
) -> float:
    """Factor on the learning rates of all later steps, by the metrics of an epoch; mostly 1.

    Epochs without the schedule's metric, which were not evaluated, are not counted.

    Args:
        schedule: The spec's schedule.
        metrics: Metrics of the epoch.
        notes: `session.notes`, which keep the best value and the epochs since for a resumed run.
    """
    if schedule.metric not in metrics:
        return 1.0
    BestMetric(notes, _PLATEAU, schedule, schedule.min_delta).update(metrics)
    note = {"cooldown": 0, "fraction": 1.0, **notes[_PLATEAU]}
    notes[_PLATEAU] = note
    if note["cooldown"]:
        note.update(cooldown=note["cooldown"] - 1, stale=0)
    if note["stale"] < schedule.patience:
        return 1.0
    factor: float = min(1.0, max(schedule.factor, schedule.min_fraction / note["fraction"]))
    note.update(cooldown=schedule.cooldown, stale=0, fraction=note["fraction"] * factor)
    return factor
