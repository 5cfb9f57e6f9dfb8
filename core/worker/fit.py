"""The built-in training loop, written with the public API of the session only."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from isotrain.core.worker.early_stopping import BestEpochTracker

if TYPE_CHECKING:
    from isotrain.core.data.batch import Batch
    from isotrain.core.session.session import Session


def _do_nothing() -> None:
    """The default callback."""


def fit(session: Session, on_epoch_end: Callable[[], None] = _do_nothing) -> dict[str, float]:
    """Trains to the end of the run, with metrics and evaluation at the end of epochs. Collective.

    Saves checkpoints, keeps the best weights and stops early as the spec says.

    Returns:
        The metrics of the last epoch by name, those of the evaluation as `validation_<name>`.
    """
    metrics: dict[str, float] = session.notes.get("metrics", {})
    tracker = BestEpochTracker(session)
    if tracker.should_stop:
        session.stop()
    for batch in session.batches():
        if batch.step == 0:
            session.try_metrics(batch)
        session.step(batch)
        is_best = False
        if batch.is_last_of_epoch or session.is_done:
            metrics = session.notes["metrics"] = _end_epoch(session, batch)
            on_epoch_end()
            is_best = tracker.update(metrics)
            if tracker.should_stop:
                session.stop()
        session.save_if_due(best=is_best, overlap_next_step=True)
    if tracker.restores_best:
        session.restore_best()
    return metrics


def _end_epoch(session: Session, batch: Batch) -> dict[str, float]:
    metrics = session.metrics()
    interval = session.spec.evaluation.every_epochs if session.can_evaluate else 0
    if interval and (session.is_done or (batch.epoch + 1) % interval == 0):
        evaluated = session.evaluate()
        metrics |= {f"validation_{name}": value for name, value in evaluated.items()}
    session.end_epoch(batch.epoch, metrics)
    return metrics
