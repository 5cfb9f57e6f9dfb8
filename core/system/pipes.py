"""How much a pipe holds before who writes to it waits."""

from __future__ import annotations

import contextlib
import fcntl
from typing import IO

PIPE_BYTES = 1 << 20
"""Linux gives anybody so much; a new pipe holds a sixteenth of it."""


def enlarge_pipe(pipe: int | IO[bytes] | IO[str]) -> None:
    """Has a pipe hold 1 MiB, so that who prints goes on for a while though nobody reads.

    Args:
        pipe: Either end; with what is no pipe, or where the user has too many of them, nothing happens.
    """
    with contextlib.suppress(OSError):
        fcntl.fcntl(pipe, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
