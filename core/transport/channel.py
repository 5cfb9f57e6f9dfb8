"""The line between rank 0 and another process of a joined run."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from isotrain.core.system.process import poll_readable
from isotrain.core.transport.connection import Connection, ConnectionLostError
from isotrain.core.transport.message_reader import Message

_SEND_SECONDS = 5.0
_FINISH_SECONDS = 1.0
_LOOK_SECONDS = 0.02


class Channel:
    """Sends from any thread, and receives in one. What cannot be sent any more is dropped: who reads notices.

    Attributes:
        here: The address of this end.
    """

    def __init__(self, wire: Connection) -> None:
        wire.limit_sending(_SEND_SECONDS)
        self.here = wire.here
        self._wire = wire
        self._inbox = wire.reader()
        self._lock = threading.Lock()
        self._unread: list[Message] = []

    def fileno(self) -> int:
        """For selectors."""
        return self._wire.fileno()

    def send(self, header: Mapping[str, Any], arrays: Sequence[np.ndarray] = ()) -> None:
        """Sends one message, if the other end is still there.

        Raises:
            IsotrainError: It is too long.
        """
        with self._lock:
            try:
                self._wire.send(header, arrays)
            except (
                ConnectionLostError
            ):  # a part of it may be there: what followed would be taken for the rest
                self._wire.shutdown()

    @property
    def received(self) -> int:
        """Bytes that have come in so far."""
        return self._inbox.received

    def read(self) -> list[Message] | None:
        """The messages that have come, without waiting; None when no more will."""
        unread, self._unread = self._unread, []
        try:
            new = self._inbox.read()
        except (ValueError, KeyError, TypeError):  # nobody here says that
            new = None
        return None if new is None and not unread else [*unread, *(new or ())]

    def put_back(self, messages: Sequence[Message]) -> None:
        """Has these come again, before all others."""
        self._unread = [*messages, *self._unread]

    def wait(self, seconds: float) -> Message | None:
        """Waits for the next message; None where the other end is gone, or says nothing for so long."""
        deadline = time.monotonic() + seconds
        while True:
            messages = self.read()
            if messages is None:
                return None
            if messages:
                first, *others = messages
                self.put_back(others)
                return first
            if not poll_readable([self.fileno()], max(0.0, deadline - time.monotonic())):
                return None

    def has_gone(self, seconds: float) -> bool:
        """Whether the other end has gone without a word, or goes within so many seconds."""
        if not self._unread and poll_readable([self.fileno()], seconds):
            messages = self.read()
            self.put_back(messages or ())
            return messages is None
        return False

    def await_end(self, seconds: float) -> None:
        """Returns when the other end will say no more, or after so many seconds; drops what it says."""
        deadline = time.monotonic() + seconds
        while self.read() is not None:
            left = deadline - time.monotonic()
            if left < 0 or not poll_readable([self.fileno()], left):
                return

    def shutdown(self) -> None:
        """Lets nothing through any more, from either end."""
        self._wire.shutdown()

    def close(self) -> None:
        """Ends it; the other end notices at once."""
        self._wire.close()

    def shutdown_write(self) -> None:
        """Lets the other end know that nothing will follow what was sent."""
        self._wire.shutdown_write()


def finish(channels: Iterable[Channel], seconds: float = _FINISH_SECONDS) -> None:
    """Ends channels once all that was sent is read at their other ends, or after so many seconds.

    To close one with something unread in it would make the system take back what was sent last.
    """
    left = list(channels)
    for channel in left:
        channel.shutdown_write()
    deadline = time.monotonic() + seconds
    while left and time.monotonic() < deadline:
        for channel in [each for each in left if each.read() is None]:
            channel.close()
            left.remove(channel)
        time.sleep(_LOOK_SECONDS)
    for channel in left:
        channel.close()
