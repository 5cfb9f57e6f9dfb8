"""Events that wait for whoever reads them: a bounded number of bytes, and what is left out is counted."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, Generic, TypeVar

from isotrain.core.contracts.events import Output, Progress, Steps

MOST_BYTES = 1 << 27
"""That wait: about two million steps."""
_STEP_BYTES = 64
_EVENT_BYTES = 200
_MAY_BE_LEFT_OUT = (Output.kind, Progress.kind, Steps.kind)

Item = TypeVar("Item")


class EventQueue(Generic[Item]):
    """A queue of events in some form; of progress in a row only the newest is kept. Not thread-safe."""

    def __init__(self, as_item: Callable[[str], Item], most_bytes: int = MOST_BYTES) -> None:
        """Begins empty.

        Args:
            as_item: Makes an event of a text that says what was left out.
            most_bytes: Roughly; steps, progress and output beyond that are left out.
        """
        self._as_item = as_item
        self._most_bytes = most_bytes
        self._waiting: deque[tuple[Item, str, int]] = deque()
        self._bytes = 0
        self._steps_left_out = 0
        self._outputs_left_out = 0

    @property
    def is_full(self) -> bool:
        """Whether steps, progress and output are left out."""
        return self._bytes > self._most_bytes

    @staticmethod
    def is_droppable(kind: str) -> bool:
        """Whether events of a kind are left out where too much waits already."""
        return kind in _MAY_BE_LEFT_OUT

    def add(self, item: Item, kind: str, fields: Mapping[str, Any]) -> None:
        """Adds an event, or counts what is left out with it.

        Args:
            item: The event, as `take` gives it.
            kind: The event's kind.
            fields: The event's fields.
        """
        if self.is_full and self.is_droppable(kind):
            self._steps_left_out += len(fields.get("losses", ()))
            self._outputs_left_out += kind == Output.kind
            return
        self._tell_what_was_left_out()
        if kind == Progress.kind and self._waiting and self._waiting[-1][1] == kind:
            self._bytes -= self._waiting.pop()[2]
        texts = (value for value in fields.values() if isinstance(value, str))
        size = _EVENT_BYTES + sum(map(len, texts)) + _STEP_BYTES * len(fields.get("losses", ()))
        self._waiting.append((item, kind, size))
        self._bytes += size

    def take(self) -> Item | None:
        """Removes and returns the oldest event; None where none waits."""
        if not self._waiting:
            self._tell_what_was_left_out()
        if not self._waiting:
            return None
        item, _, size = self._waiting.popleft()
        self._bytes -= size
        return item

    def _tell_what_was_left_out(self) -> None:
        steps, outputs = self._steps_left_out, self._outputs_left_out
        if steps or outputs:
            self._steps_left_out = self._outputs_left_out = 0
            left_out = f"{steps} steps and {outputs} pieces of output were left out here"
            text = f"nobody read for too long: {left_out}"
            self._waiting.append((self._as_item(text), "", 0))
