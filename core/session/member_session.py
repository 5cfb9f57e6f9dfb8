"""The session of a process in an elastic run, whose state goes on in the next process group."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from isotrain.core.contracts.membership import Membership
from isotrain.core.data.dataset import DataSet
from isotrain.core.data.identity import DataIdentity, data_identity
from isotrain.core.session.checkpointing.handover import CarriedState
from isotrain.core.session.session import Session

_ITERATION = "built-in loop"
"""Key of `iteration` among the notes that are handed over."""
_IS_STOPPED = "training was ended early"
"""Key of whether training was ended early among them."""
_KEPT = {"spec", "plan", "rank", "run_directory", "callbacks", "notes", "iteration", "_closed"}
"""Attributes of a session whose process group is gone; the others lead to the model."""


class MemberSession(Session):
    """Session of a member of a process group; it hands its state over to the members of the next group."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        """Opens the session, as `Session`, and keeps a copy of the state of each savepoint from then on."""
        self._savepoint: tuple[int, CarriedState] | None = None
        """Number of restores before the last savepoint, and its state."""
        super().__init__(*arguments, **options)
        self._training.keep_savepoint = self._keep_savepoint

    def _keep_savepoint(self) -> None:
        state = self._checkpoints.carried_state(*self._progress())
        self._savepoint = self._trainer_state.restore_count, state

    @property
    def data(self) -> DataSet:
        """The data set, which the next process group goes on with."""
        return self._session_context.loaders.data

    def data_identity(self) -> DataIdentity:
        """Identity of the data set, which newcomers must have too. Local."""
        return self._session_context.compared_data or data_identity(self.data)

    def carried_state(self) -> CarriedState:
        """Copies the state with which this process goes on in another process group. Local.

        The session cannot be used afterwards. A callback may keep it, and does not keep the model with it.
        """
        self._closed = True
        state, restores = CarriedState.none(), self._trainer_state.restore_count
        if self._trainer_state.is_savepoint:
            state = self._checkpoints.carried_state(*self._progress(), self._training.undo)
        elif self._savepoint is not None and self._savepoint[0] == restores:
            metrics = self._checkpoints.metrics()
            state = replace(self._savepoint[1], metrics_of_next=metrics)
        self._checkpoints.give_up()
        self._training.undo = None
        self._session_context.loaders.close()
        for name in self.__dict__.keys() - _KEPT:
            del self.__dict__[name]
        return state

    def _progress(self) -> tuple[dict[str, Any], int, bool]:
        """Notes to hand over, parts of the built-in loop that are done, and whether metrics are collected."""
        here = {_ITERATION: dict(self.iteration), _IS_STOPPED: self._trainer_state.is_stopped}
        notes, step = {**self.notes, **here}, self.iteration.get("step")
        phase = self.iteration.get("phase", 0) if step == self.steps_done - 1 else 0
        return notes, phase, phase > 0 and self.iteration["ends_epoch"]

    def take_over(self, location: str, membership: Membership) -> None:
        """Takes the state that members of the last process group handed over. Collective.

        Args:
            location: Folder of the state.
            membership: Members of this process group.
        """
        self.notes = self._checkpoints.take_over(location, membership)
        self.iteration = self.notes.pop(_ITERATION)
        self._trainer_state.is_stopped = self.notes.pop(_IS_STOPPED)
