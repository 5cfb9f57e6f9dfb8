"""Showing what a process printed last, should it die without a word: killed, or by native code."""

from __future__ import annotations

import contextlib
import faulthandler
import subprocess
import sys
from collections.abc import Callable, Iterator

Dismiss = Callable[[], None]

_STDERR = 2
_MOST_BYTES = 1 << 16
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
    """Should this process end within it, a small one beside it shows the end of its output.

    Where the system starts no further process, nothing is shown.

    Args:
        log: Descriptor of the file that the output goes to.
        shown: Descriptor of where to show it.

    Yields:
        What ends that one without a word, to be called before this process ends on purpose.
    """
    try:
        witness = _started(log, shown)
    except OSError:
        yield lambda: None
        return

    def dismiss() -> None:
        with contextlib.suppress(OSError, ValueError):  # it is gone, or dismissed
            witness.communicate(b".")

    try:
        yield dismiss
    finally:
        dismiss()


def _started(log: int, shown: int) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-I", "-S", "-c", _PROGRAM, str(log), str(_MOST_BYTES)],
        stdin=subprocess.PIPE,
        stdout=shown,
        stderr=subprocess.DEVNULL,
        pass_fds=(log,),
        start_new_session=True,
    )


@contextlib.contextmanager
def faulthandler_enabled() -> Iterator[None]:
    """Within it, a crash of native code writes where each thread was to standard error."""
    if faulthandler.is_enabled():
        yield
        return
    faulthandler.enable(file=_STDERR, all_threads=True)
    try:
        yield
    finally:
        faulthandler.disable()
