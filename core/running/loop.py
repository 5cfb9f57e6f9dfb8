"""The built-in training loop, written on the session and on nothing more."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from isotrain.core.running.session import Session


def _nothing() -> None:
    """For callers who have nothing to do at the end of an epoch."""


def fit(session: Session, epoch_ended: Callable[[], None] = _nothing) -> dict[str, float]:
    """Trains to the end of the run, with metrics and evaluation at the ends of epochs.

    Args:
        session: To train in.
        epoch_ended: Called after each epoch.

    Returns:
        The metrics of the last epoch, evaluation's as `validation_<name>`.
    """
    metrics: dict[str, float] = {}
    interval = session.spec.evaluation.every_epochs if session.can_evaluate else 0
    for batch in session.batches():
        session.step(batch)
        if not (batch.is_last_of_epoch or session.is_done):
            continue
        metrics = session.metrics()
        if interval and (session.is_done or (batch.epoch + 1) % interval == 0):
            evaluated = session.evaluate()
            metrics |= {f"validation_{name}": value for name, value in evaluated.items()}
        session.end_epoch(batch.epoch, metrics)
        epoch_ended()
    return metrics
