"""The built-in training loop, written with the public API of the session only."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

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
    callbacks = Callbacks(session.callbacks)
    tracker = BestEpochTracker(session)
    after_step = _AfterStep(session, callbacks, tracker, on_epoch_end)
    if tracker.should_stop:
        session.stop()
    callbacks.call("on_start", session)
    after_step.finish()  # the step before, if a process was lost then
    for batch in session.batches():
        if batch.step == 0:
            tracker.require_metrics(session.try_metrics(batch))
            if session.spec.evaluation.at_start:
                evaluated = session.validate()
                session.log(evaluated, step=0)
                callbacks.call("on_evaluation", session, evaluated)
        after_step.begin(batch)
        loss = session.step(batch)
        callbacks.call("on_step", session, batch, loss)
        after_step.finish()
    if tracker.restores_best:
        session.restore_best()
    metrics: dict[str, float] = session.notes.get("metrics", {})
    callbacks.call("on_end", session, metrics)
    return metrics


class _AfterStep:
    """Parts of the loop after a step; an elastic run goes on with the part in which a process was lost.

    `session.iteration` has the step (`step`, `epoch`, `ends_epoch`), the number of parts that are done
    (`phase`), and what they have measured.
    """

    def __init__(
        self,
        session: Session,
        callbacks: Callbacks,
        tracker: BestEpochTracker,
        on_epoch_end: Callable[[], None],
    ) -> None:
        self._session = session
        self._callbacks = callbacks
        self._tracker = tracker
        self._on_epoch_end = on_epoch_end

    def begin(self, batch: Batch) -> None:
        """Notes the step that is taken next."""
        self._session.iteration = {
            "step": batch.step,
            "epoch": batch.epoch,
            "is_last_of_epoch": batch.is_last_of_epoch,
            "phase": 0,
        }

    def finish(self) -> None:
        """Does the parts that are left after the last step. Collective."""
        session, now = self._session, self._session.iteration
        if now.get("step") != session.steps_done - 1:
            return  # the step itself was broken off, or is of an earlier process
        parts = (
            *(self._collect, self._evaluate, self._tell_evaluation),
            *(self._end_epoch, self._tell_epoch, self._track, self._save),
        )
        for index in range(now["phase"], len(parts)):
            parts[index](now)
            now["phase"] = index + 1

    def _collect(self, now: dict[str, Any]) -> None:
        """Reduces the metrics of an epoch. Collective."""
        now["ends_epoch"] = now["is_last_of_epoch"] or self._session.is_done
        now["measured"] = self._session.metrics() if now["ends_epoch"] else {}

    def _evaluate(self, now: dict[str, Any]) -> None:
        """Evaluates if that is due; logs the metrics, with `every_steps`. Collective."""
        session = self._session
        evaluation, steps_done = session.spec.evaluation, session.steps_done
        epochs_done = now["epoch"] + 1 if now["is_last_of_epoch"] else None
        is_due = evaluation.is_due(steps_done, epochs_done, is_done=session.is_done)
        now["evaluated"] = session.validate() if is_due else {}
        if is_due and evaluation.every_steps is not None:
            session.log(now["evaluated"], step=steps_done)
        now["measured"] |= now["evaluated"]

    def _tell_evaluation(self, now: dict[str, Any]) -> None:
        session, evaluated = self._session, now["evaluated"]
        if evaluated:
            self._callbacks.call("on_evaluation", session, evaluated)
            if not now["ends_epoch"] and not session.spec.evaluation.every_epochs:
                session.reduce_on_plateau(evaluated)

    def _end_epoch(self, now: dict[str, Any]) -> None:
        """Reports the end of an epoch. Local."""
        session = self._session
        if now["ends_epoch"]:
            metrics = session.notes["metrics"] = now["measured"]
            session.notes["loss"] = session.end_epoch(now["epoch"], metrics)
            self._on_epoch_end()

    def _tell_epoch(self, now: dict[str, Any]) -> None:
        if now["ends_epoch"]:
            self._callbacks.call("on_epoch", self._session, now["epoch"], now["measured"])

    def _track(self, now: dict[str, Any]) -> None:
        """Compares the metrics with the best ones. Local."""
        now["is_best"] = self._tracker.update(now["measured"])
        if self._tracker.should_stop:
            self._session.stop()

    def _save(self, now: dict[str, Any]) -> None:
        """Saves a checkpoint if one is due. Collective."""
        best, overlaps = now["is_best"], not self._callbacks
        if self._session.save_if_due(best=best, overlap_next_step=overlaps):
            self._callbacks.call("on_checkpoint", self._session)
