"""Reduction of the learning rate on a plateau of a metric."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from isotrain.core.session.training.best_metric import BestMetric
from isotrain.core.spec.schedules import PlateauSchedule


def plateau_fraction(
    schedule: PlateauSchedule,
    metrics: Mapping[str, float],
    notes: dict[str, Any],
    key: str,
    fraction: float,
) -> float:
    """Fraction of the scheduled learning rate in all later steps, by the metrics of an epoch.

    Epochs without the schedule's metric, which were not evaluated, are not counted.

    Args:
        schedule: Schedule of the spec, or of one of its updates.
        metrics: Metrics of the epoch.
        notes: `session.notes`, which keep the best value and the epochs since for a resumed run.
        key: Key of the note.
        fraction: Fraction so far.
    """
    if schedule.metric not in metrics:
        return fraction
    BestMetric(notes, key, schedule, schedule.min_delta).update(metrics)
    note = notes[key] = {"cooldown": 0, **notes[key]}
    if note["cooldown"]:
        note.update(cooldown=note["cooldown"] - 1, stale=0)
    if note["stale"] < schedule.patience:
        return fraction
    note.update(cooldown=schedule.cooldown, stale=0)
    return min(fraction, max(fraction * schedule.factor, schedule.min_fraction))
