"""Heartbeat interval of processes that were started from outside, and their SIGTERM handler."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from types import FrameType

from isotrain.core.contracts.reporter import HEARTBEAT_SECONDS

_EXIT_CODE = 128 + signal.SIGTERM


@contextlib.contextmanager
def sigterm_as_exception() -> Iterator[None]:
    """Context in which SIGTERM raises SystemExit, so that the process can report its end.

    A program with its own SIGTERM handler keeps it.
    """
    is_main_thread = threading.current_thread() is threading.main_thread()
    if not is_main_thread or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield
        return
    signal.signal(signal.SIGTERM, _raise_exit)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _raise_exit(number: int, frame: FrameType | None) -> None:
    signal.signal(number, signal.SIG_IGN)
    raise SystemExit(_EXIT_CODE)


_SECONDS_PER_PROCESS = 0.002
"""Rank 0 reads the messages of all processes beside its own training."""
_BEATS_PER_SILENCE = 4


@dataclass(frozen=True)
class HeartbeatInterval:
    """Interval between the status messages of a process.

    Attributes:
        min_seconds: Shortest interval, in seconds, used while the status changes.
        max_seconds: Longest interval, in seconds; each message is a sign of life.
    """

    min_seconds: float
    max_seconds: float

    @classmethod
    def of(cls, processes: int, silence: float) -> HeartbeatInterval:
        """The interval for a run with so many processes, and with `timeouts.silence` in seconds."""
        longest = silence / _BEATS_PER_SILENCE
        shortest = min(_SECONDS_PER_PROCESS * processes, longest)
        return cls(shortest, min(max(HEARTBEAT_SECONDS, shortest), longest))
