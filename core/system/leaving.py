"""Ending a process in which frameworks have run: their threads may abort or hang when it is torn down."""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import os
import sys

_EXIT_SECONDS = 5.0


class _Process:
    """This process."""

    has_worked = False


def note_work() -> None:
    """Notes that a framework is about to run in this process, which has a program of its own."""
    _Process.has_worked = True


def leave(code: int) -> None:
    """Ends this process without tearing the interpreter down."""
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)


def leave_after_work(code: int) -> None:
    """As `leave`, if a framework has run here; else nothing."""
    if _Process.has_worked:
        leave(code)


def limit_the_end() -> None:
    """Sees to it that this process, once it ends, does so: a framework may wait for peers that are gone."""
    atexit.register(_limit)


def _limit() -> None:
    nowhere = os.open(os.devnull, os.O_WRONLY)
    faulthandler.dump_traceback_later(_EXIT_SECONDS, exit=True, file=nowhere)
