"""How often the processes of a joined run tell each other where they are."""

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


_SECONDS_PER_PROCESS = 0.002
"""Rank 0 hears of all of them, and has work of its own to do."""
_WITHIN_SILENCE = 4


@dataclass(frozen=True)
class HeartbeatInterval:
    """How often, in seconds.

    Attributes:
        min_seconds: Between two messages at least, where something has changed.
        max_seconds: Between two at most: each is a sign of life.
    """

    min_seconds: float
    max_seconds: float

    @classmethod
    def of(cls, processes: int, silence: float) -> HeartbeatInterval:
        """For a run.

        Args:
            processes: Of it.
            silence: Seconds without a sign of life after which one is taken for lost.
        """
        most = silence / _WITHIN_SILENCE
        news = min(_SECONDS_PER_PROCESS * processes, most)
        return cls(news, min(max(HEARTBEAT_SECONDS, news), most))
