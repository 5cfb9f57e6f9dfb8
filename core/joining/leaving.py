"""Ending a process that may be unable to end by itself."""

from __future__ import annotations

import atexit
import faulthandler
import os

END_SECONDS = 2.0
"""That the work of a process has to end by itself when its run has failed."""
_EXIT_SECONDS = 5.0


def leave_for_sure() -> None:
    """Sees to it that this process, once it ends, does so: a framework may wait for peers that are gone."""
    atexit.register(_limit_the_end)


def _limit_the_end() -> None:
    nowhere = os.open(os.devnull, os.O_WRONLY)
    faulthandler.dump_traceback_later(_EXIT_SECONDS, exit=True, file=nowhere)
