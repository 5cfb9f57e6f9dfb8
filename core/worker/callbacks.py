"""Callbacks of the built-in loop: objects of the user with any of the methods of `Callback`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from isotrain.core.errors import SpecError, unknown_name
from isotrain.core.spec import import_strings

if TYPE_CHECKING:
    from isotrain.core.contracts.backend.replica import Tensor
    from isotrain.core.data.batch import Batch
    from isotrain.core.session.session import Session


class Callback:
    """Callback of the built-in loop in every training process; each method does nothing by default.

    A subclass is not required: an object with some of these methods is a callback. All processes call the
    same methods at the same points, in the order of the spec, so that a callback may call whatever the
    session has. Values to keep over a resume belong into `session.notes`.
    """

    def on_start(self, session: Session) -> None:
        """Called before the first step, after a resumed run has loaded its checkpoint."""

    def on_step(self, session: Session, batch: Batch, loss: Tensor) -> None:
        """Called after each step with its batch and its mean loss, a scalar tensor."""

    def on_evaluation(self, session: Session, metrics: Mapping[str, float]) -> None:
        """Called after each evaluation with its metrics, named as in the history."""

    def on_epoch(self, session: Session, epoch: int, metrics: Mapping[str, float]) -> None:
        """Called at the end of an epoch (from 0) with its metrics, those of its evaluation included."""

    def on_checkpoint(self, session: Session) -> None:
        """Called when a checkpoint is being saved, which goes on in the background."""

    def on_end(self, session: Session, metrics: Mapping[str, float]) -> None:
        """Called after the last step with the metrics of the last epoch, before the weights are written."""


HOOKS = tuple(name for name in vars(Callback) if name.startswith("on_"))


class Callbacks:
    """The callbacks of a run in one process."""

    def __init__(self, references: Sequence[Any]) -> None:
        """Imports the callbacks, and makes objects of classes and functions.

        Args:
            references: The spec's callbacks, or references to them.

        Raises:
            SpecError: A callback has a method whose name is no hook, or none that is.
        """
        self._callbacks = [_made(reference) for reference in references]

    def __bool__(self) -> bool:
        return bool(self._callbacks)

    def call(self, hook: str, session: Session, *arguments: Any) -> None:
        """Calls a method of each callback that has it; an error ends the run, and names the callback."""
        for callback in self._callbacks:
            method = getattr(callback, hook, None)
            if method is None:
                continue
            try:
                method(session, *arguments)
            except Exception as error:
                error.add_note(f"raised by the callback {type(callback).__name__}.{hook}")
                raise


def _made(reference: Any) -> Any:
    found = import_strings.resolve(reference)
    is_factory = isinstance(found, type) or not _hooks(found)
    callback = found() if is_factory and callable(found) else found
    hooks = _hooks(callback)
    for hook in hooks:
        if hook not in HOOKS:
            raise SpecError(
                f"callbacks: {type(callback).__name__}: {unknown_name('method', hook, HOOKS)}"
            )
    if not hooks:
        raise SpecError(
            f"callbacks: {import_strings.describe(reference)}: expected a method of"
            f" {', '.join(HOOKS)}; it has none."
        )
    return callback


def _hooks(callback: Any) -> list[str]:
    """Public methods whose names begin as those of hooks."""
    return [n for n in dir(callback) if n.startswith("on_") and callable(getattr(callback, n))]
