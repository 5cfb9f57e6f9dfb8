"""Early stopping and tracking of the best epoch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from isotrain.core.errors import SpecError, unknown_name
from isotrain.core.session.training.best_metric import BestMetric

if TYPE_CHECKING:
    from isotrain.core.session.session import Session

_BEST = "best"
_EARLY_STOPPING = "early stopping"
_METRIC_NAMES = "names of metrics"


class BestEpochTracker:
    """The spec's `checkpoint.keep_best` and `early_stopping`.

    Attributes:
        restores_best: Whether to restore the best weights after training.
    """

    def __init__(self, session: Session) -> None:
        """Continues from the session's notes.

        Raises:
            SpecError: The run that continues has no metric of a monitored name.
        """
        self._session = session
        policy, stopping = session.spec.checkpoint, session.spec.early_stopping
        keep_best = None if policy is None else policy.keep_best
        reset = session.best_step is None
        self._best = (
            None
            if keep_best is None
            else BestMetric(session.notes, _BEST, keep_best, 0.0, reset=reset)
        )
        self._stopping = (
            None
            if stopping is None
            else BestMetric(session.notes, _EARLY_STOPPING, stopping, stopping.min_delta)
        )
        self._patience = 0 if stopping is None else stopping.patience
        self.restores_best = keep_best is not None and keep_best.restore
        self._losses = ["loss", *(f"{update}_loss" for update in session.spec.updates or ())]
        if session.steps_done > 0:
            self._require_metrics()

    @property
    def should_stop(self) -> bool:
        """Whether training should stop."""
        return (
            self._stopping is not None and self._stopping.evaluations_since_best >= self._patience
        )

    def update(self, metrics: Mapping[str, float]) -> bool:
        """Records the metrics of an epoch or evaluation; returns whether to keep its weights as the best."""
        if self._stopping is not None:
            self._stopping.update(metrics)
        return self._best is not None and self._best.update(metrics)

    def require_metrics(self, tried: Iterable[str]) -> None:
        """Checks the names of monitored metrics before the first step, also that of a plateau schedule.

        Args:
            tried: Names that `Session.try_metrics` returned, as only an objective knows those of its losses.

        Raises:
            SpecError: The run has no metric of a monitored name.
        """
        if self._session.spec.monitored_metrics:
            measured = [name for name in tried if name not in self._losses]
            names = dict.fromkeys([*self._session.metrics(), *measured])
            self._session.notes[_METRIC_NAMES] = [*names]
            self._require_metrics()

    def _require_metrics(self) -> None:
        session, spec = self._session, self._session.spec
        names = list(session.notes.get(_METRIC_NAMES, spec.monitored_metrics))
        if spec.evaluation.every_epochs or spec.evaluation.every_steps:
            evaluated = (*self._losses, *names, *spec.metrics_over_all)
            names += [
                f"{prefix}{name}" for prefix in session.validation_prefixes for name in evaluated
            ]
        for metric in spec.monitored_metrics:
            if metric in names:
                continue
            called_here = metric.replace("val_", "validation_", 1) if metric[:4] == "val_" else None
            message = unknown_name("metric of an epoch", metric, names, called_here=called_here)
            if metric.startswith("val") and not session.can_evaluate:
                message += " The data have no validation part: see `validation_split`."
            raise SpecError(message)
