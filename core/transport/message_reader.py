"""Receiving messages of a wire as they come in, without waiting."""

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
"""A header of JSON values, and arrays."""

LENGTH = struct.Struct("!Q")
HEADER_LIMIT = 1 << 30
"""Bytes of a header: what says more is no message of a process that has proved the key."""
UNAUTHENTICATED_LIMIT = 1 << 26
"""The same where messages have no seal: there, somebody in between may have said so."""
_CHUNK = 1 << 18


class MessageReader:
    """Puts messages together from what has come in so far.

    Attributes:
        received: Bytes that have come in, of messages that are not whole yet too.
    """

    def __init__(
        self, connection: socket.socket, seal: Mac | None = None, tls: TlsEndpoint | None = None
    ) -> None:
        """Takes a connection.

        Args:
            connection: To read from.
            seal: Of its messages; None: they have none.
            tls: Encrypts it; None: nothing does.
        """
        self.received = 0
        self._limit = HEADER_LIMIT if seal else UNAUTHENTICATED_LIMIT
        self._seal = seal
        self._tls = tls
        self._connection = connection
        self._unread = bytearray()

    def read(self) -> list[Message] | None:
        """The messages that are whole; None when the connection has ended, and no more will come.

        Raises:
            ValueError: It is no message.
        """
        has_ended = not self._take_in()
        messages = []
        while (message := self._next()) is not None:
            messages.append(message)
        return None if has_ended and not messages else messages

    def _take_in(self) -> bool:
        """Reads what there is; whether more may come."""
        while True:
            try:
                chunk = self._connection.recv(_CHUNK, socket.MSG_DONTWAIT)
                self.received += len(chunk)
                self._unread += chunk if self._tls is None else self._tls.decrypted(chunk)
            except BlockingIOError:
                return True
            except OSError:  # of TLS too
                return False
            if not chunk:
                return False

    def _next(self) -> Message | None:
        if len(self._unread) < LENGTH.size:
            return None
        (length,) = LENGTH.unpack_from(self._unread)
        if length > self._limit:
            raise ValueError(f"{length} bytes were announced, at most {self._limit} are right")
        start = LENGTH.size + length
        if len(self._unread) < start:
            return None
        header = json.loads(self._unread[LENGTH.size : start])
        kinds = [(np.dtype(kind), tuple(shape)) for kind, shape in header.pop("arrays")]
        sizes = [kind.itemsize * math.prod(shape) for kind, shape in kinds]
        end = start + sum(sizes)
        if len(self._unread) < end + (MAC_BYTES if self._seal else 0):
            return None
        self._require_seal(end)
        arrays = []
        for (kind, shape), size in zip(kinds, sizes, strict=True):
            flat = np.frombuffer(bytes(self._unread[start : start + size]), kind)
            arrays.append(flat.reshape(shape))
            start += size
        del self._unread[: end + (MAC_BYTES if self._seal else 0)]
        return header, arrays

    def _require_seal(self, end: int) -> None:
        if self._seal is None:
            return
        seal = bytes(self._unread[end : end + MAC_BYTES])
        with memoryview(self._unread) as unread, unread[:end] as message:  # no copy: it may be long
            fits = self._seal.verify(seal, [message])
        if not fits:
            raise ValueError("a message does not have its seal")
