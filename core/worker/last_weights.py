"""The weights of a run that has not finished, which survive its failure."""

from __future__ import annotations

import contextlib
import time
from typing import TYPE_CHECKING

from isotrain.core.launching.run_directory.run_directory import last_weights_file, last_weights_path
from isotrain.core.session.weights.weights_file import save_weights

if TYPE_CHECKING:
    from isotrain.core.contracts.replica_group import ReplicaGroup
    from isotrain.core.session.session import Session

_SECONDS = 30.0


def _are_whole(group: ReplicaGroup) -> bool:
    """Whether this process has all weights as they are now."""
    return all(info.offset is None for info in group.describe_state(("trainable",)).values())


class LastWeights:
    """Keeps the newest weights in the run directory: `weights-after-N-steps.safetensors`. Of rank 0."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._kept = time.monotonic()

    def keep_if_due(self) -> None:
        """Keeps them unless it was done in the last 30 seconds, so that it costs next to nothing."""
        if time.monotonic() - self._kept >= _SECONDS:
            self.keep()

    def keep(self) -> None:
        """Keeps them in place of those before."""
        session = self._session
        before = last_weights_file(session.run_directory)
        now = last_weights_path(session.run_directory, session.steps_done)
        if session.steps_done and now != before and _are_whole(session.group):
            save_weights(session.group, now)
            if before is not None:
                before.unlink()
        self._kept = time.monotonic()

    def keep_if_possible(self) -> None:
        """The same after a failure, which may have left nothing to read."""
        with contextlib.suppress(Exception):
            self.keep()

    def forget(self) -> None:
        """Removes those that were kept: the final ones are there."""
        kept = last_weights_file(self._session.run_directory)
        if kept is not None:
            kept.unlink()
