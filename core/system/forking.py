"""Whether processes of this machine can be forked and watched."""

from __future__ import annotations

import os
import sys


def fork_obstacle() -> str | None:
    """Why this system cannot fork the processes of a run, or None."""
    if sys.platform != "linux":
        return f"frameworks cannot be forked on {sys.platform}"
    try:
        os.close(os.pidfd_open(os.getpid()))
    except OSError as error:
        return f"this system has no process descriptors ({error.strerror})"
    return None
