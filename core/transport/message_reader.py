"""Non-blocking, incremental parser of the messages of a connection."""

from __future__ import annotations

import json
import math
import socket
import struct
from typing import TYPE_CHECKING, Any

import numpy as np

from isotrain.core.transport.message_auth import MAC_BYTES, Mac

if TYPE_CHECKING:
    from isotrain.core.transport.tls import TlsEndpoint

Message = tuple[dict[str, Any], list[np.ndarray]]
"""Header of JSON values, and arrays of any shapes and dtypes."""

LENGTH = struct.Struct("!Q")
HEADER_LIMIT = 1 << 30
"""Maximum bytes of a header on a connection with MACs."""
UNAUTHENTICATED_LIMIT = 1 << 26
"""Maximum bytes of a header without MACs: a third party may have changed the length."""
_CHUNK = 1 << 18


class MessageReader:
    """Reads whole messages from a socket without blocking, and buffers incomplete ones.

    Attributes:
        received: Bytes received so far, incomplete messages included.
    """

    def __init__(
        self, connection: socket.socket, mac: Mac | None = None, tls: TlsEndpoint | None = None
    ) -> None:
        """Starts with an empty buffer; without `mac` messages have none, without `tls` no encryption."""
        self.received = 0
        self._limit = HEADER_LIMIT if mac else UNAUTHENTICATED_LIMIT
        self._mac = mac
        self._tls = tls
        self._connection = connection
        self._unread = bytearray()

    def read(self) -> list[Message] | None:
        """The complete messages; None at the end of the stream.

        Raises:
            ValueError: The bytes are no message, or its MAC is wrong.
        """
        has_ended = not self._fill_buffer()
        messages = []
        while (message := self._next()) is not None:
            messages.append(message)
        return None if has_ended and not messages else messages

    def _fill_buffer(self) -> bool:
        """Reads the available bytes; returns False at the end of the stream."""
        while True:
            try:
                chunk = self._connection.recv(_CHUNK, socket.MSG_DONTWAIT)
                self.received += len(chunk)
                self._unread += chunk if self._tls is None else self._tls.decrypted(chunk)
            except BlockingIOError:
                return True
            except OSError:  # TLS errors too
                return False
            if not chunk:
                return False

    def _next(self) -> Message | None:
        if len(self._unread) < LENGTH.size:
            return None
        (length,) = LENGTH.unpack_from(self._unread)
        if length > self._limit:
            raise ValueError(
                f"expected a message header of at most {self._limit} bytes, received a length of {length}"
            )
        start = LENGTH.size + length
        if len(self._unread) < start:
            return None
        header = json.loads(self._unread[LENGTH.size : start])
        kinds = [(np.dtype(kind), tuple(shape)) for kind, shape in header.pop("arrays")]
        sizes = [kind.itemsize * math.prod(shape) for kind, shape in kinds]
        end = start + sum(sizes)
        if len(self._unread) < end + (MAC_BYTES if self._mac else 0):
            return None
        self._require_mac(end)
        arrays = []
        for (kind, shape), size in zip(kinds, sizes, strict=True):
            flat = np.frombuffer(bytes(self._unread[start : start + size]), kind)
            arrays.append(flat.reshape(shape))
            start += size
        del self._unread[: end + (MAC_BYTES if self._mac else 0)]
        return header, arrays

    def _require_mac(self, end: int) -> None:
        if self._mac is None:
            return
        received = bytes(self._unread[end : end + MAC_BYTES])
        with memoryview(self._unread) as unread, unread[:end] as message:  # no copy: it may be long
            is_authentic = self._mac.verify(received, [message])
        if not is_authentic:
            raise ValueError("a message has a wrong MAC")
