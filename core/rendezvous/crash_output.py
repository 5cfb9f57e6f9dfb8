"""Shows the last output of a process that is killed or crashes in native code."""

from __future__ import annotations

import contextlib
import faulthandler
import subprocess
import sys
from collections.abc import Callable, Iterator

Dismiss = Callable[[], None]

_STDERR = 2
_MAX_BYTES = 1 << 16
_PROGRAM = """
import os, signal, sys
signal.signal(signal.SIGINT, signal.SIG_IGN)
signal.signal(signal.SIGTERM, signal.SIG_IGN)
log, most = int(sys.argv[1]), int(sys.argv[2])
if not sys.stdin.buffer.read(1):
    size = os.fstat(log).st_size
    os.write(1, os.pread(log, most, max(0, size - most)))
"""


@contextlib.contextmanager
def output_tail_on_crash(log: int, shown: int) -> Iterator[Dismiss]:
    """Context in which a helper process shows the tail of this process's output if this process dies.

    If no process can be started, nothing is shown.

    Yields:
        A function that ends the helper silently; call it before this process ends on purpose.
    """
    try:
        helper = _start_helper(log, shown)
    except OSError:
        yield lambda: None
        return

    def dismiss() -> None:
        with contextlib.suppress(OSError, ValueError):  # it is gone, or dismissed
            helper.communicate(b".")

    try:
        yield dismiss
    finally:
        dismiss()


def _start_helper(log: int, shown: int) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-I", "-S", "-c", _PROGRAM, str(log), str(_MAX_BYTES)],
        stdin=subprocess.PIPE,
        stdout=shown,
        stderr=subprocess.DEVNULL,
        pass_fds=(log,),
        start_new_session=True,
    )


@contextlib.contextmanager
def faulthandler_enabled() -> Iterator[None]:
    """Context in which a crash in native code writes the stacks of all threads to standard error."""
    if faulthandler.is_enabled():
        yield
        return
    faulthandler.enable(file=_STDERR, all_threads=True)
    try:
        yield
    finally:
        faulthandler.disable()
