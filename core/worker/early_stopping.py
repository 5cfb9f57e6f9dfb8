"""Which epoch was the best so far, and whether it is time to stop."""

from __future__ import annotations

from collections.abc import Mapping
from math import isnan
from typing import TYPE_CHECKING, Any

from isotrain.core.errors import SpecError, unknown_name
from isotrain.core.spec.checkpoint_policy import MonitoredMetric

if TYPE_CHECKING:
    from isotrain.core.session.session import Session

_BEST = "best"
_TO_STOP = "early stopping"
_NAMES = "names of metrics"


class BestMetric:
    """Follows one metric of the epochs; how, is in `session.notes`, so that a resumed run knows it."""

    def __init__(
        self,
        session: Session,
        name: str,
        watched: MonitoredMetric,
        min_delta: float,
        *,
        anew: bool = False,
    ) -> None:
        """Takes up where `session.notes` says it is; begins anew where they are of another metric."""
        self._watched = watched
        self._min_delta = min_delta
        what = [watched.metric, watched.larger_is_better]
        if anew or session.notes.get(name, {}).get("what") != what:
            session.notes[name] = {"what": what, "value": None, "stale": 0}
        self._note: dict[str, Any] = session.notes[name]

    @property
    def epochs_since_best(self) -> int:
        """Evaluated epochs since the best."""
        return int(self._note["stale"])

    def update(self, metrics: Mapping[str, float]) -> bool:
        """Takes an epoch's metrics; says whether it is the best so far.

        An epoch that was not evaluated counts for nothing.
        """
        name = self._watched.metric
        if name not in metrics:
            return False
        value, known = metrics[name], self._note["value"]
        best = None if known is None else float(known)  # infinite ones come back as texts
        sign = 1.0 if self._watched.larger_is_better else -1.0
        if isnan(value) or (best is not None and sign * (value - best) <= self._min_delta):
            self._note["stale"] += 1
            return False
        self._note.update(value=value, stale=0)
        return True


class BestEpochTracker:
    """What the spec says of the best epoch: that it is kept, and when no better one is waited for."""

    def __init__(self, session: Session) -> None:
        """Takes up where the run is.

        Raises:
            SpecError: A metric that is to be followed is none of this run's.
        """
        policy, stopping = session.spec.checkpoint, session.spec.early_stopping
        kept = None if policy is None else policy.keep_best
        anew = session.best_step is None
        self._kept = None if kept is None else BestMetric(session, _BEST, kept, 0.0, anew=anew)
        self._stopping = (
            None
            if stopping is None
            else BestMetric(session, _TO_STOP, stopping, stopping.min_delta)
        )
        self._patience = 0 if stopping is None else stopping.patience
        self.restores_best = kept is not None and kept.restore
        followed = [each.metric for each in (kept, stopping) if each is not None]
        if followed:
            _require_known(followed, session)

    @property
    def should_stop(self) -> bool:
        """Whether training should stop."""
        return self._stopping is not None and self._stopping.epochs_since_best >= self._patience

    def update(self, metrics: Mapping[str, float]) -> bool:
        """Takes an epoch's metrics; says whether its weights are to be kept as the best."""
        if self._stopping is not None:
            self._stopping.update(metrics)
        return self._kept is not None and self._kept.update(metrics)


def _require_known(followed: list[str], session: Session) -> None:
    """Asks for the metrics once while there is nothing in them, so that no epoch is trained in vain."""
    if session.steps_done == 0:
        session.notes[_NAMES] = [*session.metrics()]
    names = list(session.notes.get(_NAMES, followed))
    if session.can_evaluate and session.spec.evaluation.every_epochs:
        names += [f"validation_{name}" for name in ("loss", *names)]
    for metric in followed:
        if metric in names:
            continue
        called_here = metric.replace("val_", "validation_", 1) if metric[:4] == "val_" else None
        words = unknown_name("metric of an epoch", metric, names, called_here=called_here)
        if metric.startswith("val") and not session.can_evaluate:
            words += " The data have no validation part: see `validation_split`."
        raise SpecError(words)
