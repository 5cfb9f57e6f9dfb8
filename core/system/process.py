"""Exit of this process and of child processes, exit codes, and small process-wide contexts.

`Popen.poll` and `Popen.wait` reap an ended process. Its process id, and with the last member that of its
process group, may then be reused, and a signal to it would hit a stranger. `exit_code` and `wait_for_end` do
not reap.
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
from pathlib import Path
from typing import Any


@contextlib.contextmanager
def gc_paused() -> Iterator[None]:
    """Context without cyclic garbage collection.

    Importing a framework makes over a million objects that live as long as the process. The collector would
    traverse all of them again and again, which takes about a sixth of the import's time.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def fork_obstacle() -> str | None:
    """Reason why this system cannot run a fork server; None if it can."""
    if sys.platform != "linux":
        return f"frameworks cannot be forked on {sys.platform}"
    try:
        os.close(os.pidfd_open(os.getpid()))
    except OSError as error:
        return f"this system has no process descriptors ({error.strerror})"
    return None


def peak_memory_bytes() -> int:
    """Peak resident memory of this process in bytes.

    Not `getrusage`: its figure starts at that of the process which started this one.
    """
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("/proc/self/status tells no VmHWM")


_TAIL_LINES = 5


def signal_name(number: int) -> str:
    """Name of a signal, such as `SIGABRT`; most real-time signals have none."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def describe_exit(exit_code: int) -> str:
    """The end of a process before its work was done, as a predicate; a negative code is a signal."""
    if exit_code == -signal.SIGKILL:
        return "was ended by SIGKILL (kill -9, or the system ran out of memory)"
    if exit_code < 0:
        return f"was ended by {signal_name(-exit_code)}"
    return f"ended with exit code {exit_code} before its work was done"


def output_tail(text: str) -> str:
    """The last five lines of a process's output, joined into one; "nothing" if there are none."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return " / ".join(lines[-_TAIL_LINES:]) or "nothing"


_EXIT_SECONDS = 5.0
_JOIN_SECONDS = 3.0
"""The part of `_EXIT_SECONDS` that a thread has to notice that its peers are gone, and to end."""


class _Process:
    """State of this process."""

    has_used_framework = False


def note_framework_use() -> None:
    """Notes that a framework is about to run in this process, which is the user's own program."""
    _Process.has_used_framework = True


def exit_process(code: int) -> None:
    """Exits with `os._exit` after the `atexit` functions, without finalizing the interpreter."""
    _ignore_signals()
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)


def _ignore_signals() -> None:
    """Ignores signals that have a Python handler, so that a second Ctrl-C does not raise during the exit."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if callable(signal.getsignal(number)):
            with contextlib.suppress(ValueError):  # only the main thread may set handlers
                signal.signal(number, signal.SIG_IGN)


def exit_after_work(code: int) -> None:
    """Calls `exit_process` if a framework has run in this process; otherwise does nothing."""
    if _Process.has_used_framework:
        exit_process(code)


def exit_after_failure(work: threading.Thread) -> None:
    """Registers an exit handler so that this process ends with its own exit code after its run has failed.

    Threads of frameworks may wait for peers that are gone; one that returns into a finalized interpreter
    aborts the process. So the process exits without finalization if an uncaught error ends it; otherwise the
    run's thread `work` gets a few seconds to end. While it has not ended, the exit functions have a few
    seconds, too: a framework's may wait for that thread, as Horovod's does while Horovod starts.
    """
    atexit.register(_exit_within_limit, work)


def _exit_within_limit(work: threading.Thread) -> None:
    atexit.unregister(_exit_within_limit)
    _ignore_signals()
    is_working = work.is_alive()
    if is_working:
        devnull = os.open(os.devnull, os.O_WRONLY)
        faulthandler.dump_traceback_later(_EXIT_SECONDS, exit=True, file=devnull)
    if isinstance(getattr(sys, "last_value", None), Exception):  # uncaught: its traceback was shown
        exit_process(1)
    if is_working:
        work.join(_JOIN_SECONDS)


@contextlib.contextmanager
def environ_set(variables: Mapping[str, str]) -> Iterator[None]:
    """Context in which environment variables of this process are set; restores them at its end."""
    previous = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in previous.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


_POLL_SECONDS = 0.02


def exit_code(process: subprocess.Popen[Any]) -> int | None:
    """Exit code without reaping; None while it runs, negative if a signal ended it.

    The process keeps its process id until `process.wait()`.
    """
    if process.returncode is not None:
        return process.returncode
    try:
        ended = os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:  # other code in this program has reaped it
        return process.poll()
    return None if ended is None else exit_code_from(ended)


def wait_for_end(process: subprocess.Popen[Any], seconds: float | None = None) -> None:
    """Waits for a process to end, without reaping it; `seconds` at most (None: no limit)."""
    if process.returncode is not None:
        return
    if seconds is None:
        with contextlib.suppress(ChildProcessError):
            os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        return
    deadline = time.monotonic() + seconds
    while exit_code(process) is None and time.monotonic() < deadline:
        time.sleep(_POLL_SECONDS)


def exit_code_from(ended: os.waitid_result) -> int:
    """Exit code from the result of `os.waitid`; negative if a signal ended the process."""
    return ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status


def poll_readable(descriptors: Collection[int], timeout: float | None) -> list[int]:
    """Polls file descriptors for so many seconds (None: no limit); returns those readable or at their end."""
    poll = select.poll()
    for descriptor in descriptors:
        poll.register(descriptor, select.POLLIN)
    milliseconds = None if timeout is None else timeout * 1000
    return [descriptor for descriptor, _ in poll.poll(milliseconds)]
