"""The weights of a run that has not finished, which survive its failure."""

from __future__ import annotations

import contextlib
import time
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING

from isotrain.core.errors import IsotrainError
from isotrain.core.launching.run_directory import kept_weights, weights_after
from isotrain.core.system.whole_file import whole_file

if TYPE_CHECKING:
    import numpy as np

    from isotrain.core.running.session import Session

WEIGHTS_FILE = "weights.npz"
"""Where a run directory has the final weights."""

_SECONDS = 30.0


class KeptWeights:
    """Keeps the newest weights in the run directory: `weights-after-N-steps.npz`. Of rank 0."""

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
        before = kept_weights(session.run_directory)
        now = weights_after(session.run_directory, session.steps_done)
        if session.steps_done and now != before:
            save_weights(session, now)
            if before is not None:
                before.unlink()
        self._kept = time.monotonic()

    def keep_if_possible(self) -> None:
        """The same after a failure, which may have left nothing to read."""
        with contextlib.suppress(Exception):
            self.keep()

    def forget(self) -> None:
        """Removes those that were kept: the final ones are there."""
        kept = kept_weights(self._session.run_directory)
        if kept is not None:
            kept.unlink()


def read_weights(path: Path) -> dict[str, np.ndarray]:
    """Reads what `save_weights` wrote.

    Raises:
        IsotrainError: There is no such file, or it is not one of weights.
    """
    import numpy as np

    try:
        with np.load(path, allow_pickle=False) as archive:
            return {name: archive[name] for name in archive.files}
    except (OSError, ValueError, zipfile.BadZipFile) as error:
        raise IsotrainError(f"{path}: the weights cannot be read: {error}.") from error


def save_weights(session: Session, target: Path) -> None:
    """Writes the weights, trained and not trained, as named arrays."""
    import numpy as np

    weights = session.read_state(("trainable", "non-trainable"))
    with whole_file(target) as stream:
        np.savez(stream, **weights)  # type: ignore[arg-type]
