"""Messages between a launcher and its fork server: length-prefixed JSON over a Unix socket.

File descriptors travel with a message as ancillary data (``SCM_RIGHTS``).
"""

from __future__ import annotations

import json
import socket
import struct
from collections.abc import Mapping
from typing import Any

_LENGTH = struct.Struct("<Q")
_MAX_DESCRIPTORS = 16


def encode(message: Mapping[str, Any]) -> bytes:
    """A message of JSON values as bytes; file descriptors may travel with the first of them, at most 16."""
    body = json.dumps(message).encode()
    return _LENGTH.pack(len(body)) + body


def receive(connection: socket.socket) -> tuple[dict[str, Any], list[int]] | None:
    """Waits for a message and its descriptors; None if the peer is gone."""
    length, descriptors, _, _ = socket.recv_fds(
        connection, _LENGTH.size, _MAX_DESCRIPTORS, socket.MSG_CMSG_CLOEXEC | socket.MSG_WAITALL
    )
    if len(length) < _LENGTH.size:
        return None
    body = bytearray()
    (size,) = _LENGTH.unpack(length)
    while len(body) < size:
        chunk = connection.recv(size - len(body))
        if not chunk:
            return None
        body += chunk
    return json.loads(body), descriptors
