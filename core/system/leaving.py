"""Ending a process in which frameworks have run: their threads may abort or hang when it is torn down."""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import os
import signal
import sys
import threading

_EXIT_SECONDS = 5.0
_WORK_SECONDS = 3.0
"""Of these: for work that waits for peers to see that they are gone, which ends it."""


class _Process:
    """This process."""

    has_worked = False


def note_framework_use() -> None:
    """Notes that a framework is about to run in this process, which has a program of its own."""
    _Process.has_worked = True


def exit_process(code: int) -> None:
    """Ends this process without tearing the interpreter down."""
    _heed_signals_no_more()
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)


def _heed_signals_no_more() -> None:
    """Lets no signal raise from here on, as a second Ctrl-C would in what is called at the end."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if callable(signal.getsignal(number)):
            with contextlib.suppress(ValueError):  # another thread than the main one
                signal.signal(number, signal.SIG_IGN)


def exit_after_work(code: int) -> None:
    """As `exit_process`, if a framework has run here; else nothing."""
    if _Process.has_worked:
        exit_process(code)


def exit_after_failure(work: threading.Thread) -> None:
    """Sees to it that this process, whose run has failed, ends, and with its own exit code.

    Threads of frameworks wait for peers that are gone; one that comes back to an interpreter that is
    torn down aborts the process. So it leaves without tearing down if an error ends it; else its work
    has a little time at the end.

    Args:
        work: The thread that the run was worked on.
    """
    atexit.register(_end, work)


def _end(work: threading.Thread) -> None:
    atexit.unregister(_end)
    _heed_signals_no_more()
    if isinstance(getattr(sys, "last_value", None), Exception):  # was shown: nobody has caught it
        exit_process(1)
    if work.is_alive():
        nowhere = os.open(os.devnull, os.O_WRONLY)
        faulthandler.dump_traceback_later(_EXIT_SECONDS, exit=True, file=nowhere)
        work.join(_WORK_SECONDS)
