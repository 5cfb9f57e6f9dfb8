"""Whether and how child processes have ended, while their numbers are still theirs.

`Popen.poll` and `Popen.wait` give the number of an ended process back, and that of its group with the last of
its members: a signal to them may then end somebody else's.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import gc
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Collection, Iterator, Mapping
from typing import Any


@contextlib.contextmanager
def gc_paused() -> Iterator[None]:
    """No cyclic garbage collection inside.

    Importing a framework makes over a million objects that live as long as the process, and the
    collector would go through all of them again and again: about a sixth of the import's time.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def fork_obstacle() -> str | None:
    """Why this system cannot fork the processes of a run, or None."""
    if sys.platform != "linux":
        return f"frameworks cannot be forked on {sys.platform}"
    try:
        os.close(os.pidfd_open(os.getpid()))
    except OSError as error:
        return f"this system has no process descriptors ({error.strerror})"
    return None


_LINES = 5


def signal_name(number: int) -> str:
    """Such as `SIGABRT`; most real-time signals have no name."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def last_words(text: str) -> str:
    """The last lines of what a process wrote, as one; "nothing" if there are none."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return " / ".join(lines[-_LINES:]) or "nothing"


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


@contextlib.contextmanager
def environ_set(variables: Mapping[str, str]) -> Iterator[None]:
    """Sets environment variables of this process, and puts the former values back."""
    former = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in former.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


_LOOK_SECONDS = 0.02


def exit_code(process: subprocess.Popen[Any]) -> int | None:
    """None while it runs; negative when a signal ended it. It keeps its number until `process.wait()`."""
    if process.returncode is not None:
        return process.returncode
    try:
        ended = os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:  # somebody else in this program has collected it
        return process.poll()
    return None if ended is None else exit_code_from(ended)


def wait_for_end(process: subprocess.Popen[Any], seconds: float | None = None) -> None:
    """Returns when it has ended, and keeps its number; or after so many seconds."""
    if process.returncode is not None:
        return
    if seconds is None:
        with contextlib.suppress(ChildProcessError):
            os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        return
    deadline = time.monotonic() + seconds
    while exit_code(process) is None and time.monotonic() < deadline:
        time.sleep(_LOOK_SECONDS)


def exit_code_from(ended: os.waitid_result) -> int:
    """The exit code of a process that has ended; negative when a signal ended it."""
    return ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status


def poll_readable(descriptors: Collection[int], patience: float | None) -> list[int]:
    """Those from which something can be read, the end included.

    Args:
        descriptors: To look at.
        patience: Seconds to wait for the first; None: for ever.
    """
    poll = select.poll()
    for descriptor in descriptors:
        poll.register(descriptor, select.POLLIN)
    milliseconds = None if patience is None else patience * 1000
    return [descriptor for descriptor, _ in poll.poll(milliseconds)]
