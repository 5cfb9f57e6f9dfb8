"""Turns signals that ask a run to end, or to save, into a checkpoint first."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator, Sequence
from types import FrameType
from typing import Any, Protocol

from isotrain.core.errors import EndedError, RunFailedError

_ENDING = (signal.SIGINT, signal.SIGTERM)


class AcceptsRequests(Protocol):
    """A process that can be asked for a checkpoint."""

    @property
    def accepts_requests(self) -> bool:
        """Whether its loop looks for wishes."""

    def request_checkpoint(self, *, and_end: bool) -> None:
        """Tells it that a checkpoint is wanted, and whether the run is to end after that."""


@contextlib.contextmanager
def checkpoint_on_signals(processes: Sequence[AcceptsRequests]) -> Iterator[None]:
    """Within it, SIGUSR1 asks the run for a checkpoint; SIGINT and SIGTERM ask it to end after one.

    When the run has ended for that, the signal that asked for it is raised anew, and does what it does
    without this; a run that came to its end meanwhile has ended well.
    A second signal to end does that at once, and so does the first where a loop looks for no wishes. Signals
    that are ignored stay so; only the main thread can hear any.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    hearing = _Hearing(processes)
    hearing.begin()
    try:
        yield
    except RunFailedError as failure:
        hearing.end()
        if hearing.asked_to_end is not None and failure.was_asked:
            try:
                signal.raise_signal(hearing.asked_to_end)
            except BaseException as asked:
                raise asked from None  # the run has ended as it was asked to: no failure is behind this
            raise EndedError(str(failure)) from failure
        raise
    finally:
        hearing.end()


class _Hearing:
    """Hears signals in the place of who heard them before.

    Attributes:
        asked_to_end: The signal that has asked the run to end after a checkpoint.
    """

    def __init__(self, processes: Sequence[AcceptsRequests]) -> None:
        self.asked_to_end: int | None = None
        self._processes = processes
        self._before: dict[int, Any] = {}

    def begin(self) -> None:
        """Takes the place of handlers; a signal that is ignored stays so."""
        own = {signal.SIGUSR1: self._save, **dict.fromkeys(_ENDING, self._save_and_end)}
        for number, handler in own.items():
            if signal.getsignal(number) is not signal.SIG_IGN:
                self._before[number] = signal.signal(number, handler)

    def end(self) -> None:
        """Gives back their place."""
        while self._before:
            number, handler = self._before.popitem()
            signal.signal(number, handler)

    def _save(self, number: int, frame: FrameType | None) -> None:
        for process in self._processes:
            process.request_checkpoint(and_end=False)

    def _save_and_end(self, number: int, frame: FrameType | None) -> None:
        willing = all(process.accepts_requests for process in self._processes)
        if self.asked_to_end is not None or not willing:
            self.end()
            signal.raise_signal(number)
            return
        self.asked_to_end = number
        for process in self._processes:
            process.request_checkpoint(and_end=True)
