"""The best value of a metric over evaluations."""

from __future__ import annotations

from collections.abc import Mapping
from math import isnan
from typing import Any

from isotrain.core.spec.checkpoint_policy import MonitoredMetric


class BestMetric:
    """The best value of one metric over evaluations, kept in `session.notes` for a resumed run."""

    def __init__(
        self,
        notes: dict[str, Any],
        name: str,
        monitored: MonitoredMetric,
        min_delta: float,
        *,
        reset: bool = False,
    ) -> None:
        """Continues from the notes, unless these are of another metric.

        Args:
            notes: `session.notes`.
            name: Key of the note.
            monitored: Metric to track.
            min_delta: An improvement must be larger than this.
            reset: Whether to start over in any case.
        """
        self._monitored = monitored
        self._min_delta = min_delta
        what = [monitored.metric, monitored.larger_is_better]
        if reset or notes.get(name, {}).get("what") != what:
            notes[name] = {"what": what, "value": None, "stale": 0}
        self._note: dict[str, Any] = notes[name]

    @property
    def evaluations_since_best(self) -> int:
        """Number of evaluations since the best one."""
        return int(self._note["stale"])

    def update(self, metrics: Mapping[str, float]) -> bool:
        """Records the metrics of an epoch or evaluation; returns whether it is the best so far.

        Those without the metric are not counted.
        """
        name = self._monitored.metric
        if name not in metrics:
            return False
        value, previous = metrics[name], self._note["value"]
        best = None if previous is None else float(previous)  # infinite ones come back as texts
        sign = 1.0 if self._monitored.larger_is_better else -1.0
        # Written so that an infinite value is no improvement on an equal one: their difference is NaN.
        if isnan(value) or (best is not None and not sign * (value - best) > self._min_delta):
            self._note["stale"] += 1
            return False
        self._note.update(value=value, stale=0)
        return True
