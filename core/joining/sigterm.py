"""What SIGTERM does to a process of a joined run: an engine sends it to all once one of them has died."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType

_EXIT_CODE = 128 + signal.SIGTERM


@contextlib.contextmanager
def sigterm_as_exception() -> Iterator[None]:
    """Within it, SIGTERM unwinds the program that it would end at once, so that it can say why first.

    A program that has a way of its own keeps it.
    """
    has_listener = threading.current_thread() is threading.main_thread()
    if not has_listener or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield
        return
    signal.signal(signal.SIGTERM, _end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _end(number: int, frame: FrameType | None) -> None:
    signal.signal(number, signal.SIG_IGN)
    raise SystemExit(_EXIT_CODE)
