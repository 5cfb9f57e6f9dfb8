"""Early stopping and tracking of the best epoch."""

from __future__ import annotations

from collections.abc import Mapping
from math import isnan
from typing import TYPE_CHECKING, Any

from isotrain.core.errors import SpecError, unknown_name
from isotrain.core.spec.checkpoint_policy import MonitoredMetric

if TYPE_CHECKING:
    from isotrain.core.session.session import Session

_BEST = "best"
_EARLY_STOPPING = "early stopping"
_METRIC_NAMES = "names of metrics"


class BestMetric:
    """Tracks the best value of one metric over epochs, in `session.notes`, so that a resumed run has it."""

    def __init__(
        self,
        session: Session,
        name: str,
        monitored: MonitoredMetric,
        min_delta: float,
        *,
        reset: bool = False,
    ) -> None:
        """Continues from `session.notes`, unless these are of another metric.

        Args:
            session: Session of the run.
            name: Key of the note.
            monitored: Metric to track.
            min_delta: An improvement must be larger than this.
            reset: Whether to start over in any case.
        """
        self._monitored = monitored
        self._min_delta = min_delta
        what = [monitored.metric, monitored.larger_is_better]
        if reset or session.notes.get(name, {}).get("what") != what:
            session.notes[name] = {"what": what, "value": None, "stale": 0}
        self._note: dict[str, Any] = session.notes[name]

    @property
    def epochs_since_best(self) -> int:
        """Number of evaluated epochs since the best one."""
        return int(self._note["stale"])

    def update(self, metrics: Mapping[str, float]) -> bool:
        """Records an epoch's metrics; returns whether it is the best so far.

        Epochs without the metric, which were not evaluated, are not counted.
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


class BestEpochTracker:
    """The spec's `checkpoint.keep_best` and `early_stopping`.

    Attributes:
        restores_best: Whether to restore the best weights after training.
    """

    def __init__(self, session: Session) -> None:
        """Continues from the session's notes.

        Raises:
            SpecError: The run has no metric of a monitored name.
        """
        policy, stopping = session.spec.checkpoint, session.spec.early_stopping
        keep_best = None if policy is None else policy.keep_best
        reset = session.best_step is None
        self._best = (
            None if keep_best is None else BestMetric(session, _BEST, keep_best, 0.0, reset=reset)
        )
        self._stopping = (
            None
            if stopping is None
            else BestMetric(session, _EARLY_STOPPING, stopping, stopping.min_delta)
        )
        self._patience = 0 if stopping is None else stopping.patience
        self.restores_best = keep_best is not None and keep_best.restore
        monitored = [each.metric for each in (keep_best, stopping) if each is not None]
        if monitored:
            _require_metrics(monitored, session)

    @property
    def should_stop(self) -> bool:
        """Whether training should stop."""
        return self._stopping is not None and self._stopping.epochs_since_best >= self._patience

    def update(self, metrics: Mapping[str, float]) -> bool:
        """Records an epoch's metrics; returns whether its weights are to be kept as the best."""
        if self._stopping is not None:
            self._stopping.update(metrics)
        return self._best is not None and self._best.update(metrics)


def _require_metrics(monitored: list[str], session: Session) -> None:
    """Checks the names of monitored metrics before any training, on the names of the empty metrics."""
    if session.steps_done == 0:
        session.notes[_METRIC_NAMES] = [*session.metrics()]
    names = list(session.notes.get(_METRIC_NAMES, monitored))
    if session.can_evaluate and session.spec.evaluation.every_epochs:
        names += [f"validation_{name}" for name in ("loss", *names)]
    for metric in monitored:
        if metric in names:
            continue
        called_here = metric.replace("val_", "validation_", 1) if metric[:4] == "val_" else None
        message = unknown_name("metric of an epoch", metric, names, called_here=called_here)
        if metric.startswith("val") and not session.can_evaluate:
            message += " The data have no validation part: see `validation_split`."
        raise SpecError(message)
