"""The thread on which one logger writes."""

from __future__ import annotations

import queue
import threading
import time
from typing import Any

from isotrain.core.contracts.logger import Logger

CLOSE_TIMEOUT_SECONDS = 30.0
"""How long the end of a run waits for a logger that still writes."""
MAX_QUEUED_STEPS = 200_000
"""Of those that a logger was not told of yet; further ones are left out until it has caught up."""


class WriterThread:
    """Calls a logger's methods in order until one raises; whoever has them called never waits.

    Attributes:
        name: The logger's.
    """

    def __init__(self, logger: Logger) -> None:
        self.name = logger.name
        self._logger = logger
        self._calls: queue.SimpleQueue[tuple[str, tuple[Any, ...], int] | None] = (
            queue.SimpleQueue()
        )
        self._lock = threading.Lock()
        self._steps_waiting = 0
        self._steps_left_out = 0
        self._fault: str | None = None
        self._thread = threading.Thread(
            target=self._work, name=f"isotrain-logger-{self.name}", daemon=True
        )

    def put(self, method: str, *facts: Any, steps: int = 0) -> None:
        """Has a method called when those before it have returned.

        Args:
            method: Its name.
            facts: Its arguments.
            steps: How many it tells of; it is left out where too many wait already.
        """
        if self._fault is not None:
            return
        if not self._thread.is_alive():
            self._thread.start()
        with self._lock:
            if steps and self._steps_waiting + steps > MAX_QUEUED_STEPS:
                self._steps_left_out += steps
                return
            self._steps_waiting += steps
        self._calls.put((method, facts, steps))

    def end(self) -> None:
        """Says that no further call will come."""
        self._calls.put(None)

    def wait(self, deadline: float) -> str | None:
        """Waits for the last call; returns what went wrong, if anything did."""
        self._thread.join(max(0.0, deadline - time.monotonic()))
        fault = self._fault
        if self._thread.is_alive():
            fault = f"it has not finished within {CLOSE_TIMEOUT_SECONDS:g} s, and is not waited for"
        return ". ".join(filter(None, [fault, self._left_out()])) or None

    def _left_out(self) -> str | None:
        with self._lock:
            count = self._steps_left_out
        if not count:
            return None
        return (
            f"it was too slow: {MAX_QUEUED_STEPS} steps and epochs waited for it, and {count} were left"
            " out. steps.jsonl and events.jsonl in the run directory have all"
        )

    def _work(self) -> None:
        while (call := self._calls.get()) is not None:
            method, facts, steps = call
            try:
                getattr(self._logger, method)(*facts)
            except Exception as error:  # a logger may raise anything
                self._fault = (
                    f"{method}: {type(error).__name__}: {error}. The run went on without it"
                )
                return
            with self._lock:
                self._steps_waiting -= steps
