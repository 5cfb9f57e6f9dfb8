"""Shows the events of a run on a thread of its own: a terminal or pipe that is stopped holds nobody else."""

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
"""That the display has to show the rest when this program is interrupted."""

Display = AbstractContextManager[Callable[[Item], None]]
"""Gives what shows an event."""


@contextlib.contextmanager
def threaded_display(display: Display[Event]) -> Iterator[OnEvent]:
    """Shows events to a person, who does not see steps one by one."""

    def put(event: Event) -> None:
        if not isinstance(event, Steps):
            aside.put(event, event.kind, vars(event))

    aside = _DisplayThread[Event](display, _left_out)
    with aside.showing():
        yield put


@contextlib.contextmanager
def threaded_plain_display(display: Display[Mapping[str, Any]]) -> Iterator[OnPlainEvent]:
    """Shows events as mappings."""
    aside = _DisplayThread[Mapping[str, Any]](display, lambda text: _left_out(text).to_dict())
    with aside.showing():
        yield lambda event: aside.put(event, event["event"], event)


def _left_out(text: str) -> LauncherNote:
    return LauncherNote(time=time.time(), text=f"{text}; the run directory has them")


class _DisplayThread(Generic[Item]):
    """A display on its thread, and what it has not shown yet."""

    def __init__(
        self,
        display: Display[Item],
        as_item: Callable[[str], Item],
        most_bytes: int = MOST_BYTES,
    ) -> None:
        self._display = display
        self._backlog = EventQueue(as_item, most_bytes)
        self._changed = threading.Condition()
        self._is_over = False
        self._fault: BaseException | None = None
        self._thread = threading.Thread(target=self._show, name="isotrain-display", daemon=True)

    def put(self, item: Item, kind: str, fields: Mapping[str, Any]) -> None:
        """Has an event shown; waits only with one that must not be left out while too much waits already.

        Raises:
            BaseException: What the display has raised.
        """
        with self._changed:
            self._raise_fault()
            while self._backlog.is_full and not EventQueue.is_droppable(kind):
                self._changed.wait()
                self._raise_fault()
            self._backlog.add(item, kind, fields)
            self._changed.notify_all()

    @contextlib.contextmanager
    def showing(self) -> Iterator[None]:
        """Starts the display; at the end, returns when all is shown."""
        self._thread.start()
        try:
            yield
        except BaseException as error:
            self._finish(None if isinstance(error, Exception) else _INTERRUPTED_SECONDS)
            raise
        self._finish(None)
        self._raise_fault()

    def _finish(self, patience: float | None) -> None:
        with self._changed:
            self._is_over = True
            self._changed.notify_all()
        self._thread.join(patience)

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
            while (item := self._backlog.take()) is None and not self._is_over:
                self._changed.wait()
            self._changed.notify_all()
            return item
