"""Prefetching: runs an iterator ahead of its consumer in one background thread."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Generic, TypeVar

T = TypeVar("T")

_JOIN_SECONDS = 5.0  # a source stuck in a read must not keep a run from ending


@dataclass(frozen=True, slots=True)
class _End:
    """The last item of the queue: the error that ended the iteration, or None."""

    error: BaseException | None


class _Worker(Generic[T]):
    """The producer thread, and the two queues between it and the consumer.

    Both queues are the C-implemented SimpleQueue. `free` holds one token for each item that may
    still be made, which bounds `ready`.
    """

    def __init__(self, items: Iterator[T], depth: int) -> None:
        self._items = items
        self._free: SimpleQueue[None] = SimpleQueue()
        self._ready: SimpleQueue[T | _End] = SimpleQueue()
        self._closed = False
        for _ in range(depth):
            self._free.put(None)
        self._thread = threading.Thread(target=self._run, name="isotrain-prefetch", daemon=True)

    def start(self) -> None:
        """Starts the thread."""
        self._thread.start()

    def take(self) -> T | _End:
        """Waits for the next item, and allows one more to be made."""
        item = self._ready.get()
        self._free.put(None)
        return item

    def close(self) -> None:
        """Stops the thread after its current item, and waits for it up to 5 seconds."""
        self._closed = True
        self._free.put(None)
        self._thread.join(_JOIN_SECONDS)

    def _run(self) -> None:
        try:
            self._produce()
        except BaseException as error:  # handed to the consumer, which raises it
            self._ready.put(_End(error))
        else:
            self._ready.put(_End(None))

    def _produce(self) -> None:
        try:
            while True:
                self._free.get()
                if self._closed:
                    return
                try:
                    self._ready.put(next(self._items))
                except StopIteration:
                    return
        finally:
            close = getattr(self._items, "close", None)
            if close is not None:
                close()


def prefetched(items: Iterator[T], depth: int) -> Iterator[T]:
    """Yields `items` in order while a background thread produces up to `depth` of them ahead.

    The thread starts at the first `next` and ends with the iteration, also when the consumer stops
    early or an error passes. Only the thread touches `items`; it closes them if they can be closed.

    Args:
        items: The iterator to run ahead; all its code runs in the thread.
        depth: Maximum number of items that are ready or in progress, 1 or more.

    Raises:
        Whatever `items` raised, with the traceback of where it was raised.
    """
    worker = _Worker(items, depth)
    worker.start()
    try:
        while True:
            item = worker.take()
            if isinstance(item, _End):
                break
            yield item
            del item  # else this frame keeps the batch alive while the next one is waited for
        if item.error is not None:
            raise item.error
    finally:
        worker.close()
