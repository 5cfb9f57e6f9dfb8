"""Whether the processes of a joined run see the same files, and not others under the same name."""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Iterator
from pathlib import Path

from isotrain.core.checkpoints.folder import checkpoint_at
from isotrain.core.errors import IsotrainError
from isotrain.core.system.files import is_url

_MARK_BYTES = 8


@contextlib.contextmanager
def marker_file(folder: Path) -> Iterator[str]:
    """Within it, a folder has a file that no other folder has; gives its path."""
    mark = folder.absolute() / f".seen-{secrets.token_hex(_MARK_BYTES)}"
    mark.touch()
    try:
        yield str(mark)
    finally:
        mark.unlink(missing_ok=True)


def checkpoint_token(location: str | None) -> str | None:
    """What tells a checkpoint from all others; None: it is not found here.

    Of none, and of one behind a URL, where all find the same, it is that.
    """
    if location is None or is_url(location):
        return str(location)
    try:
        return checkpoint_at(location).token
    except (IsotrainError, OSError):
        return None
