"""Requests of `isotrain join` to a running elastic run, over a Unix socket of this machine."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import socket
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

_CREDENTIALS = struct.Struct("3i")
"""Process id, user id and group id of the other end, as Linux tells them (`SO_PEERCRED`)."""


def _address(run_directory: Path) -> bytes:
    """Name of a run's socket in the kernel's abstract namespace: it ends with the run, and leaves no file."""
    found = run_directory.stat()
    name = hashlib.sha256(f"{found.st_dev} {found.st_ino}".encode()).hexdigest()
    return b"\0isotrain-join-" + name[:32].encode()


class JoinRequest:
    """One request for a further replica; answered by lines of JSON until it is closed."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection

    def answer(self, fields: Mapping[str, Any]) -> None:
        """Sends an answer; does nothing if the asking program is gone."""
        with contextlib.suppress(OSError):
            self._connection.sendall(json.dumps(fields).encode() + b"\n")

    def close(self) -> None:
        """Ends the answers."""
        self._connection.close()


class JoinRequests:
    """The requests that a run receives. Those of other users are not heard."""

    def __init__(self, run_directory: Path) -> None:
        """Listens.

        Args:
            run_directory: The run's directory, by which its requests find it.
        """
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.setblocking(False)
        self._listener.bind(_address(run_directory))
        self._listener.listen()

    def accept(self) -> list[JoinRequest]:
        """The requests since the last call, without waiting."""
        requests = []
        with contextlib.suppress(BlockingIOError):
            while True:
                connection, _ = self._listener.accept()
                credentials = connection.getsockopt(
                    socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size
                )
                if _CREDENTIALS.unpack(credentials)[1] in (os.getuid(), 0):
                    requests.append(JoinRequest(connection))
                else:
                    connection.close()
        return requests

    def close(self) -> None:
        """Stops listening."""
        self._listener.close()


def request_join(run_directory: Path) -> Iterator[dict[str, Any]]:
    """Asks a running run for a further replica; yields the answers until the run closes the connection.

    Raises:
        OSError: No run listens there.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.connect(_address(run_directory))
        with connection.makefile("rb") as lines, contextlib.suppress(ConnectionResetError):
            for line in lines:
                yield json.loads(line)
