"""The background thread that calls a logger's methods."""

from __future__ import annotations

import queue
import threading
import time
from typing import Any

from isotrain.core.contracts.logger import Logger

CLOSE_TIMEOUT_SECONDS = 30.0
"""Seconds that the end of a run waits for a logger that is still writing."""
MAX_QUEUED_STEPS = 200_000
"""Maximum number of steps queued for a logger; further ones are dropped until it has caught up."""


class WriterThread:
    """Queues calls of a logger's methods, and makes them in order until one raises; callers never wait.

    Attributes:
        name: Name of the logger.
    """

    def __init__(self, logger: Logger) -> None:
        self.name = logger.name
        self._logger = logger
        self._calls: queue.SimpleQueue[tuple[str, tuple[Any, ...], int] | None] = (
            queue.SimpleQueue()
        )
        self._lock = threading.Lock()
        self._steps_queued = 0
        self._steps_dropped = 0
        self._fault: str | None = None
        self._thread = threading.Thread(
            target=self._run, name=f"isotrain-logger-{self.name}", daemon=True
        )

    def put(self, method: str, *arguments: Any, steps: int = 0) -> None:
        """Queues a call.

        Args:
            method: Name of the logger's method.
            arguments: Arguments of the method.
            steps: Number of steps that the call reports; it is dropped if too many are queued.
        """
        if self._fault is not None:
            return
        if not self._thread.is_alive():
            self._thread.start()
        with self._lock:
            if steps and self._steps_queued + steps > MAX_QUEUED_STEPS:
                self._steps_dropped += steps
                return
            self._steps_queued += steps
        self._calls.put((method, arguments, steps))

    def end(self) -> None:
        """Ends the thread after the calls that are queued."""
        self._calls.put(None)

    def wait(self, deadline: float) -> str | None:
        """Waits for the last call until `deadline`, by `time.monotonic`; returns the fault, if any."""
        self._thread.join(max(0.0, deadline - time.monotonic()))
        fault = self._fault
        if self._thread.is_alive():
            fault = f"it has not finished within {CLOSE_TIMEOUT_SECONDS:g} s, and is not waited for"
        return ". ".join(filter(None, [fault, self._dropped()])) or None

    def _dropped(self) -> str | None:
        with self._lock:
            count = self._steps_dropped
        if not count:
            return None
        return (
            f"it was too slow: {MAX_QUEUED_STEPS} steps and epochs were queued, and {count} were dropped."
            " steps.jsonl and events.jsonl in the run directory have all"
        )

    def _run(self) -> None:
        while (call := self._calls.get()) is not None:
            method, arguments, steps = call
            try:
                getattr(self._logger, method)(*arguments)
            except Exception as error:  # a logger may raise anything
                self._fault = (
                    f"{method}: {type(error).__name__}: {error}. The run went on without it"
                )
                return
            with self._lock:
                self._steps_queued -= steps
