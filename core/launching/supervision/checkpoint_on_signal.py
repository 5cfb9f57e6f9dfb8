"""Signal handlers of a running job: SIGUSR1 requests a checkpoint, SIGINT and SIGTERM an end after one."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator, Sequence
from types import FrameType
from typing import Any, Protocol

from isotrain.core.errors import EndedError, RunFailedError

_END_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class AcceptsRequests(Protocol):
    """A process that takes checkpoint requests."""

    @property
    def accepts_requests(self) -> bool:
        """Whether its training loop reads checkpoint requests."""

    def request_checkpoint(self, *, and_end: bool) -> None:
        """Requests a checkpoint, and the end of the run after it if `and_end`."""


@contextlib.contextmanager
def checkpoint_on_signals(processes: Sequence[AcceptsRequests]) -> Iterator[None]:
    """Context in which SIGUSR1 requests a checkpoint, and SIGINT and SIGTERM request the end after one.

    When the run has ended for such a request, the signal is raised again, with its previous handler. A run
    that finished meanwhile has succeeded. A second SIGINT or SIGTERM ends the run at once, and so does the
    first if a training loop reads no requests. Ignored signals stay ignored. Does nothing outside of the main
    thread, because Python handles signals only there.

    Args:
        processes: All processes of the run that are in reach.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handlers = _SignalHandlers(processes)
    handlers.install()
    try:
        yield
    except RunFailedError as failure:
        handlers.restore()
        if handlers.end_signal is not None and failure.was_asked:
            try:
                signal.raise_signal(handlers.end_signal)
            except BaseException as interrupt:
                raise interrupt from None  # the run has ended as requested: no failure caused this
            raise EndedError(str(failure)) from failure
        raise
    finally:
        handlers.restore()


class _SignalHandlers:
    """Signal handlers that forward requests to the processes of a run.

    Attributes:
        end_signal: The signal that requested the end of the run; None if there was none.
    """

    def __init__(self, processes: Sequence[AcceptsRequests]) -> None:
        self.end_signal: int | None = None
        self._processes = processes
        self._previous: dict[int, Any] = {}

    def install(self) -> None:
        """Installs the handlers; ignored signals stay ignored."""
        handlers = {signal.SIGUSR1: self._save, **dict.fromkeys(_END_SIGNALS, self._save_and_end)}
        for number, handler in handlers.items():
            if signal.getsignal(number) is not signal.SIG_IGN:
                self._previous[number] = signal.signal(number, handler)

    def restore(self) -> None:
        """Restores the previous handlers."""
        while self._previous:
            number, handler = self._previous.popitem()
            signal.signal(number, handler)

    def _save(self, number: int, frame: FrameType | None) -> None:
        for process in self._processes:
            process.request_checkpoint(and_end=False)

    def _save_and_end(self, number: int, frame: FrameType | None) -> None:
        all_accept = all(process.accepts_requests for process in self._processes)
        if self.end_signal is not None or not all_accept:
            self.restore()
            signal.raise_signal(number)
            return
        self.end_signal = number
        for process in self._processes:
            process.request_checkpoint(and_end=True)
