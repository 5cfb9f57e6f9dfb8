"""Displays a run on a separate thread, so that a stopped terminal or pipe blocks nothing else."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any, Generic

from isotrain.core.contracts.events import Event, LauncherNote, OnEvent, OnPlainEvent, Steps
from isotrain.core.contracts.reporter import MOST_BYTES, EventQueue, Item

_INTERRUPTED_SECONDS = 2.0
"""Seconds that the display has for the remaining events when this program is interrupted."""

Display = AbstractContextManager[Callable[[Item], object]]
"""A context whose value is a function that shows one event."""


@contextlib.contextmanager
def threaded_display(display: Display[Event]) -> Iterator[OnEvent]:
    """Runs a display of event objects on a thread; `Steps` events are not shown."""

    def put(event: Event) -> None:
        if not isinstance(event, Steps):
            thread.put(event, event.kind, vars(event))

    thread = _DisplayThread[Event](display, _dropped_note)
    with thread.running():
        yield put


@contextlib.contextmanager
def threaded_plain_display(display: Display[Mapping[str, Any]]) -> Iterator[OnPlainEvent]:
    """Runs a display of events as mappings on a thread."""
    thread = _DisplayThread[Mapping[str, Any]](display, lambda text: _dropped_note(text).to_dict())
    with thread.running():
        yield lambda event: thread.put(event, event["event"], event)


def _dropped_note(text: str) -> LauncherNote:
    return LauncherNote(time=time.time(), text=f"{text}; the run directory has them")


class _DisplayThread(Generic[Item]):
    """A display on its thread, with a bounded queue of events."""

    def __init__(
        self,
        display: Display[Item],
        as_item: Callable[[str], Item],
        most_bytes: int = MOST_BYTES,
    ) -> None:
        self._display = display
        self._queue = EventQueue(as_item, most_bytes)
        self._changed = threading.Condition()
        self._is_closed = False
        self._fault: BaseException | None = None
        self._thread = threading.Thread(target=self._show, name="isotrain-display", daemon=True)

    def put(self, item: Item, kind: str, fields: Mapping[str, Any]) -> None:
        """Queues an event; waits only if the queue is full and the event must not be dropped.

        Raises:
            BaseException: The error of the display.
        """
        with self._changed:
            self._raise_fault()
            while self._queue.is_full and not EventQueue.is_droppable(kind):
                self._changed.wait()
                self._raise_fault()
            self._queue.add(item, kind, fields)
            self._changed.notify_all()

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Starts the thread; on exit, waits until all events are shown."""
        self._thread.start()
        try:
            yield
        except BaseException as error:
            self._finish(None if isinstance(error, Exception) else _INTERRUPTED_SECONDS)
            raise
        self._finish(None)
        self._raise_fault()

    def _finish(self, timeout: float | None) -> None:
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        self._thread.join(timeout)

    def _raise_fault(self) -> None:
        if self._fault is not None:
            raise self._fault

    def _show(self) -> None:
        try:
            with self._display as show:
                while (item := self._next()) is not None:
                    show(item)
        except BaseException as error:  # raised again where the run is followed
            with self._changed:
                self._fault = error
                self._changed.notify_all()

    def _next(self) -> Item | None:
        """The next event, once there is one; None at the end."""
        with self._changed:
            while (item := self._queue.take()) is None and not self._is_closed:
                self._changed.wait()
            self._changed.notify_all()
            return item
