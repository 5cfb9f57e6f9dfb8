"""Sends of a stage beside its passes, where a framework's own sends wait; imports no framework."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable


class BackgroundSends:
    """Sends in threads, to each process one after the other: a send may wait for the other's receive."""

    def __init__(self) -> None:
        """Begins without threads."""
        self._queues: dict[int, queue.SimpleQueue[Callable[[], object] | None]] = {}
        self._done = threading.Condition()
        self._pending = 0
        self._error: Exception | None = None

    def start(self, destination: int, send: Callable[[], object]) -> None:
        """Starts a send to a process, by its index in the replica. Local."""
        if destination not in self._queues:
            sends = self._queues[destination] = queue.SimpleQueue()
            threading.Thread(target=self._run, args=(sends,), daemon=True).start()
        with self._done:
            self._pending += 1
        self._queues[destination].put(send)

    def _run(self, sends: queue.SimpleQueue[Callable[[], object] | None]) -> None:
        """Does the sends of a queue, until it gives None; after an error it drops them."""
        while (send := sends.get()) is not None:
            error = None
            try:
                if self._error is None:
                    send()
            except Exception as raised:
                error = raised
            del send  # its tensors
            with self._done:
                self._error = self._error or error
                self._pending -= 1
                self._done.notify_all()

    def check(self) -> None:
        """Raises the error of a send that has failed. Local."""
        if self._error is not None:
            raise self._error

    def wait(self) -> None:
        """Waits until all that was sent has arrived. Local.

        Raises:
            Exception: A send has failed, with its error.
        """
        with self._done:
            self._done.wait_for(lambda: not self._pending)
        self.check()

    def close(self) -> None:
        """Ends the threads, once their sends are done. Local."""
        for sends in self._queues.values():
            sends.put(None)
        self._queues.clear()
