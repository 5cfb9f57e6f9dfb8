"""Connection between rank 0 and another rank, when the processes were started from outside."""

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
_POLL_SECONDS = 0.02


class Channel:
    """A message channel: any thread may send, one thread receives.

    Messages to a lost peer are dropped silently: the receiving thread notices the loss.

    Attributes:
        local_address: IP address of this end.
    """

    def __init__(self, connection: Connection) -> None:
        connection.limit_sending(_SEND_SECONDS)
        self.local_address = connection.local_address
        self._connection = connection
        self._reader = connection.reader()
        self._lock = threading.Lock()
        self._unread: list[Message] = []

    def fileno(self) -> int:
        """File descriptor, for selectors."""
        return self._connection.fileno()

    def send(self, header: Mapping[str, Any], arrays: Sequence[np.ndarray] = ()) -> None:
        """Sends JSON values and arrays of any shapes and dtypes; drops them if the other end is gone.

        Raises:
            IsotrainError: The header is too long.
        """
        with self._lock:
            self._send(header, arrays)

    def send_if_idle(self, header: Mapping[str, Any]) -> None:
        """Sends JSON values as a sign of life, unless a message is being sent, which is one too."""
        if self._lock.acquire(blocking=False):
            try:
                self._send(header, ())
            finally:
                self._lock.release()

    def _send(self, header: Mapping[str, Any], arrays: Sequence[np.ndarray]) -> None:
        """`send`, with the lock."""
        try:
            self._connection.send(header, arrays)
        except ConnectionLostError:
            # a part may have been sent: the peer would take the next message for the rest
            self._connection.shutdown()

    @property
    def received(self) -> int:
        """Bytes received so far."""
        return self._reader.received

    def read(self) -> list[Message] | None:
        """The received messages, without waiting; None at the end of the stream."""
        unread, self._unread = self._unread, []
        try:
            new = self._reader.read()
        except (ValueError, KeyError, TypeError):  # not a message of this protocol
            new = None
        return None if new is None and not unread else [*unread, *(new or ())]

    def put_back(self, messages: Sequence[Message]) -> None:
        """Returns messages to the front of the queue of unread messages."""
        self._unread = [*messages, *self._unread]

    def wait(self, seconds: float) -> Message | None:
        """Waits for the next message; None if the other end is gone, or sends nothing for so long."""
        deadline = time.monotonic() + seconds
        while True:
            messages = self.read()
            if messages is None:
                return None
            if messages:
                first, *rest = messages
                self.put_back(rest)
                return first
            if not poll_readable([self.fileno()], max(0.0, deadline - time.monotonic())):
                return None

    def has_gone(self, seconds: float) -> bool:
        """Whether the other end has closed without a message, or does within so many seconds."""
        if not self._unread and poll_readable([self.fileno()], seconds):
            messages = self.read()
            self.put_back(messages or ())
            return messages is None
        return False

    def await_end(self, seconds: float) -> None:
        """Reads and drops messages until the end of the stream, for at most so many seconds."""
        deadline = time.monotonic() + seconds
        while self.read() is not None:
            remaining = deadline - time.monotonic()
            if remaining < 0 or not poll_readable([self.fileno()], remaining):
                return

    def shutdown(self) -> None:
        """Closes both directions, and keeps the descriptor; both ends notice at once."""
        self._connection.shutdown()

    def close(self) -> None:
        """Closes the connection; the other end notices at once."""
        self._connection.close()

    def shutdown_write(self) -> None:
        """Closes the sending direction: the other end reads what was sent, then the end of the stream."""
        self._connection.shutdown_write()


def finish(channels: Iterable[Channel], seconds: float = _FINISH_SECONDS) -> None:
    """Closes channels once their other ends have read all messages, after so many seconds in any case.

    Closing a socket with unread input would discard the messages sent last (TCP reset).
    """
    unfinished = list(channels)
    for channel in unfinished:
        channel.shutdown_write()
    deadline = time.monotonic() + seconds
    while unfinished and time.monotonic() < deadline:
        for channel in [each for each in unfinished if each.read() is None]:
            channel.close()
            unfinished.remove(channel)
        time.sleep(_POLL_SECONDS)
    for channel in unfinished:
        channel.close()
