"""How a launcher and its template talk: messages of JSON over a socket, descriptors beside them."""

from __future__ import annotations

import json
import socket
import struct
from collections.abc import Mapping, Sequence
from typing import Any

_LENGTH = struct.Struct("<Q")
_MOST_DESCRIPTORS = 16


def send(door: socket.socket, message: Mapping[str, Any], descriptors: Sequence[int] = ()) -> None:
    """Sends a message, and descriptors with it.

    Raises:
        OSError: The other end is gone.
    """
    body = json.dumps(message).encode()
    socket.send_fds(door, [_LENGTH.pack(len(body))], list(descriptors))
    door.sendall(body)


def receive(door: socket.socket) -> tuple[dict[str, Any], list[int]] | None:
    """Waits for a message; None where the other end is gone."""
    length, descriptors, _, _ = socket.recv_fds(
        door, _LENGTH.size, _MOST_DESCRIPTORS, socket.MSG_CMSG_CLOEXEC | socket.MSG_WAITALL
    )
    if len(length) < _LENGTH.size:
        return None
    body = bytearray()
    (size,) = _LENGTH.unpack(length)
    while len(body) < size:
        chunk = door.recv(size - len(body))
        if not chunk:
            return None
        body += chunk
    return json.loads(body), descriptors
