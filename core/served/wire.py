"""Messages between the processes of a served run: a JSON header and arrays, over TCP, without pickle."""

from __future__ import annotations

import contextlib
import json
import socket
import struct
import time
from collections.abc import Iterator, Mapping, Sequence
from multiprocessing import AuthenticationError
from multiprocessing.connection import answer_challenge, deliver_challenge
from typing import Any

import numpy as np

_LENGTH = struct.Struct("!Q")
_HEADER_LIMIT = 1 << 24
_HANDSHAKE_SECONDS = 10.0
_RETRY_SECONDS = 0.05


class WireError(Exception):
    """The other end is gone, or says what nobody says here."""


class Wire:
    """One connection, to send and receive messages whole."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket = connection

    def fileno(self) -> int:
        """For selectors."""
        return self._socket.fileno()

    def send(self, header: Mapping[str, Any], arrays: Sequence[np.ndarray] = ()) -> None:
        """Sends one message.

        Raises:
            WireError: The other end is gone.
        """
        arrays = [np.ascontiguousarray(array) for array in arrays]
        kinds = [[array.dtype.str, array.shape] for array in arrays]
        text = json.dumps({**header, "arrays": kinds}).encode()
        views = [array.reshape(-1).view(np.uint8).data for array in arrays if array.size]
        with _told(OSError):
            self.send_bytes(text)
            for view in views:
                self._socket.sendall(view)

    def receive(self) -> tuple[dict[str, Any], list[np.ndarray]]:
        """Waits for one message: its header and its arrays.

        Raises:
            WireError: The other end is gone.
        """
        with _told(OSError, ValueError, KeyError, TypeError):
            header = json.loads(self.recv_bytes(_HEADER_LIMIT))
            arrays = [np.empty(shape, np.dtype(kind)) for kind, shape in header.pop("arrays")]
            for array in arrays:
                if array.size:
                    self._fill(array.reshape(-1).view(np.uint8).data)
        return header, arrays

    def send_bytes(self, data: bytes) -> None:
        """Sends a short text; also for the authentication of `multiprocessing.connection`."""
        self._socket.sendall(_LENGTH.pack(len(data)) + data)

    def recv_bytes(self, limit: int) -> bytes:
        """Receives a short text of at most `limit` bytes."""
        prefix = bytearray(_LENGTH.size)
        self._fill(memoryview(prefix))
        (length,) = _LENGTH.unpack(prefix)
        if length > limit:
            raise WireError(f"a message of {length} bytes was announced, at most {limit} are right")
        data = bytearray(length)
        self._fill(memoryview(data))
        return bytes(data)

    def _fill(self, view: memoryview) -> None:
        while view:
            count = self._socket.recv_into(view)
            if not count:
                raise WireError("its connection was closed")
            view = view[count:]

    def close(self) -> None:
        """Ends the connection; the other end notices at once."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()


@contextlib.contextmanager
def _told(*kinds: type[Exception]) -> Iterator[None]:
    try:
        yield
    except kinds as error:
        raise WireError(f"its connection failed: {error}") from error


def accept(listener: socket.socket, key: bytes) -> Wire | None:
    """Takes one connection; None where it does not prove that it has the key."""
    connection, _ = listener.accept()
    connection.settimeout(_HANDSHAKE_SECONDS)
    wire = Wire(connection)
    try:
        deliver_challenge(wire, key)  # type: ignore[arg-type]
        answer_challenge(wire, key)  # type: ignore[arg-type]
    except (AuthenticationError, WireError, OSError, AssertionError):
        wire.close()
        return None
    connection.settimeout(None)
    return wire


def connect(address: tuple[str, int], key: bytes) -> Wire:
    """Connects to the coordinator as soon as it listens; the launcher ends whom it leaves waiting.

    Raises:
        WireError: It has another key, or is gone.
    """
    while True:
        try:
            connection = socket.create_connection(address)
            break
        except ConnectionRefusedError:
            time.sleep(_RETRY_SECONDS)
    wire = Wire(connection)
    try:
        answer_challenge(wire, key)  # type: ignore[arg-type]
        deliver_challenge(wire, key)  # type: ignore[arg-type]
    except (AuthenticationError, AssertionError, OSError) as error:
        wire.close()
        raise WireError(f"the coordinator at {address} is gone, or of another run") from error
    return wire


def packed(tree: Any, arrays: list[np.ndarray]) -> Any:
    """A tree of arrays as plain JSON values; its arrays are appended to `arrays`."""
    if isinstance(tree, tuple):
        return {"tuple": [packed(part, arrays) for part in tree]}
    if isinstance(tree, dict):
        return {"dict": [[name, packed(part, arrays)] for name, part in tree.items()]}
    if tree is None:
        return None
    arrays.append(np.asarray(tree))
    return len(arrays) - 1


def unpacked(plain: Any, arrays: Sequence[np.ndarray]) -> Any:
    """The tree of which `packed` made these."""
    if plain is None:
        return None
    if isinstance(plain, int):
        return arrays[plain]
    if "tuple" in plain:
        return tuple(unpacked(part, arrays) for part in plain["tuple"])
    return {name: unpacked(part, arrays) for name, part in plain["dict"]}
