"""The session of a process in an elastic run, whose state goes on in the next process group."""

from __future__ import annotations

from isotrain.core.contracts.membership import Membership
from isotrain.core.data.dataset import DataSet
from isotrain.core.data.identity import DataIdentity, data_identity
from isotrain.core.session.checkpointing.handover import CarriedState
from isotrain.core.session.session import Session

_ITERATION = "built-in loop"
"""Key of `iteration` among the notes that are handed over."""
_KEPT = {"spec", "plan", "rank", "run_directory", "callbacks", "notes", "iteration", "_closed"}
"""Attributes of a session whose process group is gone; the others lead to the model."""


class MemberSession(Session):
    """Session of a member of a process group; it hands its state over to the members of the next group."""

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
        notes, step = {**self.notes, _ITERATION: self.iteration}, self.iteration.get("step")
        phase = self.iteration.get("phase", 0) if step == self.steps_done - 1 else 0
        state = self._checkpoints.carried_state(notes, phase, self._training.undo)
        self._training.undo = None
        self._session_context.loaders.close()
        for name in self.__dict__.keys() - _KEPT:
            del self.__dict__[name]
        return state

    def take_over(self, location: str, membership: Membership) -> None:
        """Takes the state that members of the last process group handed over. Collective.

        Args:
            location: Folder of the state.
            membership: Members of this process group.
        """
        self.notes = self._checkpoints.take_over(location, membership)
        self.iteration = self.notes.pop(_ITERATION)
