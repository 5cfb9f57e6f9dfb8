"""The built-in training loop, written with the public API of the session only."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from isotrain.core.worker.callbacks import Callbacks
from isotrain.core.worker.early_stopping import BestEpochTracker

if TYPE_CHECKING:
    from isotrain.core.data.batch import Batch
    from isotrain.core.session.session import Session


def _do_nothing() -> None:
    """The default callback."""


def fit(session: Session, on_epoch_end: Callable[[], None] = _do_nothing) -> dict[str, float]:
    """Trains to the end of the run, with metrics of epochs, and evaluation as the spec says. Collective.

    Saves checkpoints, keeps the best weights and stops early as the spec says.

    The mean loss of the last epoch is in `session.notes["loss"]` of rank 0.

    Returns:
        The metrics of the last epoch by name, those of the evaluation as `validation_<name>`.
    """
    metrics: dict[str, float] = session.notes.get("metrics", {})
    callbacks = Callbacks(session.callbacks)
    tracker = BestEpochTracker(session)
    if tracker.should_stop:
        session.stop()
    callbacks.call("on_start", session)
    for batch in session.batches():
        if batch.step == 0:
            tracker.require_metrics(session.try_metrics(batch))
            if session.spec.evaluation.at_start:
                evaluated = session.validate()
                session.log(evaluated, step=0)
                callbacks.call("on_evaluation", session, evaluated)
        loss = session.step(batch)
        callbacks.call("on_step", session, batch, loss)
        ends_epoch = batch.is_last_of_epoch or session.is_done
        measured = session.metrics() if ends_epoch else {}
        if evaluated := _evaluate_if_due(session, batch):
            measured |= evaluated
            callbacks.call("on_evaluation", session, evaluated)
            if not ends_epoch and not session.spec.evaluation.every_epochs:
                session.reduce_on_plateau(evaluated)
        if ends_epoch:
            metrics = session.notes["metrics"] = measured
            session.notes["loss"] = session.end_epoch(batch.epoch, metrics)
            on_epoch_end()
            callbacks.call("on_epoch", session, batch.epoch, metrics)
        is_best = tracker.update(measured)
        if tracker.should_stop:
            session.stop()
        if session.save_if_due(best=is_best, overlap_next_step=not callbacks):
            callbacks.call("on_checkpoint", session)
    if tracker.restores_best:
        session.restore_best()
    callbacks.call("on_end", session, metrics)
    return metrics


def _evaluate_if_due(session: Session, batch: Batch) -> dict[str, float]:
    """Evaluates if that is due after a step; returns its metrics by name, logged with `every_steps`."""
    evaluation, steps_done = session.spec.evaluation, session.steps_done
    epochs_done = batch.epoch + 1 if batch.is_last_of_epoch else None
    if not evaluation.is_due(steps_done, epochs_done, is_done=session.is_done):
        return {}
    measured = session.validate()
    if evaluation.every_steps is not None:
        session.log(measured, step=steps_done)
    return measured
