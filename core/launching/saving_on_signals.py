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


class Saving(Protocol):
    """A process that can be asked for a checkpoint."""

    @property
    def heeds_wishes(self) -> bool:
        """Whether its loop looks for wishes."""

    def ask_for_checkpoint(self, *, and_end: bool) -> None:
        """Tells it that a checkpoint is wanted, and whether the run is to end after that."""


@contextlib.contextmanager
def saving_on_signals(processes: Sequence[Saving]) -> Iterator[None]:
    """Within it, SIGUSR1 asks the run for a checkpoint; SIGINT and SIGTERM ask it to end after one.

    When the run has ended before its last step, the signal that asked for it is raised anew, and does what it
    does without this; a run that came to its end meanwhile has ended well.
    A second signal to end does that at once, and so does the first where a loop looks for no wishes. Signals
    that are ignored stay so; only the main thread can hear any.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before: dict[int, Any] = {}
    asked: list[int] = []

    def give_back() -> None:
        while before:
            number, handler = before.popitem()
            signal.signal(number, handler)

    def save(number: int, frame: FrameType | None) -> None:
        for process in processes:
            process.ask_for_checkpoint(and_end=False)

    def save_and_end(number: int, frame: FrameType | None) -> None:
        if asked or not all(process.heeds_wishes for process in processes):
            give_back()
            signal.raise_signal(number)
            return
        asked.append(number)
        for process in processes:
            process.ask_for_checkpoint(and_end=True)

    for number, handler in {signal.SIGUSR1: save, **dict.fromkeys(_ENDING, save_and_end)}.items():
        if signal.getsignal(number) is not signal.SIG_IGN:
            before[number] = signal.signal(number, handler)
    try:
        yield
    except RunFailedError as failure:
        give_back()
        if asked:
            signal.raise_signal(asked[0])
            raise EndedError(str(failure)) from failure
        raise
    finally:
        give_back()
