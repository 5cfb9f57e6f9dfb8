"""Messages between the processes of a served run: a JSON header and arrays, over TCP, without pickle."""

from __future__ import annotations

import contextlib
import json
import socket
import struct
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from isotrain.core.contracts.service import Service
from isotrain.core.data.trees import Weighted
from isotrain.core.errors import PeerLostError
from isotrain.core.served import handshake

_LENGTH = struct.Struct("!Q")
_HEADER_LIMIT = 1 << 24
_RETRY_SECONDS = 0.05


class WireError(PeerLostError):
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
            self._socket.sendall(_LENGTH.pack(len(text)) + text)
            for view in views:
                self._socket.sendall(view)

    def receive(self) -> tuple[dict[str, Any], list[np.ndarray]]:
        """Waits for one message: its header and its arrays.

        Raises:
            WireError: The other end is gone.
        """
        with _told(OSError, ValueError, KeyError, TypeError):
            header = json.loads(self._receive_text())
            arrays = [np.empty(shape, np.dtype(kind)) for kind, shape in header.pop("arrays")]
            for array in arrays:
                if array.size:
                    _fill(array.reshape(-1).view(np.uint8).data, self._socket)
        return header, arrays

    def _receive_text(self) -> bytes:
        (length,) = _LENGTH.unpack(_receive_exactly(self._socket, _LENGTH.size))
        if length > _HEADER_LIMIT:
            raise WireError(
                f"a message of {length} bytes was announced, at most {_HEADER_LIMIT} are right"
            )
        return _receive_exactly(self._socket, length)

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


def _receive_exactly(connection: socket.socket, length: int) -> bytes:
    data = bytearray(length)
    _fill(memoryview(data), connection)
    return bytes(data)


def _fill(view: memoryview, connection: socket.socket) -> None:
    while view:
        count = connection.recv_into(view)
        if not count:
            raise WireError("its connection was closed")
        view = view[count:]


def connect(service: Service) -> Wire:
    """Connects to the coordinator as soon as it listens; the launcher ends whom it leaves waiting.

    A caller that is too slow to answer is dropped, so it calls again while the coordinator listens, for
    as long as that waits for its workers.

    Args:
        service: Of the process that connects; tells where to, with which key, and as which rank.

    Raises:
        WireError: The coordinator has another key, or is gone.
    """
    connection = _reached(service.door)
    deadline = time.monotonic() + service.start_timeout
    try:
        while not _is_let_in(connection, service):
            connection.close()
            if time.monotonic() > deadline:
                raise WireError(f"it let nobody in for {service.start_timeout:g} s")
            time.sleep(_RETRY_SECONDS)
            connection = socket.create_connection(service.door)
    except (WireError, OSError) as error:
        connection.close()
        raise WireError(f"the coordinator at {service.door} is gone, or of another run") from error
    return Wire(connection)


def _reached(address: tuple[str, int]) -> socket.socket:
    while True:
        try:
            return socket.create_connection(address)
        except ConnectionRefusedError:
            time.sleep(_RETRY_SECONDS)


def _is_let_in(connection: socket.socket, service: Service) -> bool:
    """Shakes hands; False where the other end hung up before that was done.

    Raises:
        WireError: It is no coordinator of this run.
    """
    try:
        greeting = _receive_exactly(connection, handshake.GREETING_BYTES)
        answer = handshake.answer_to(greeting, service.key, service.context.rank)
        connection.sendall(answer)
        confirmation = _receive_exactly(connection, handshake.CONFIRMATION_BYTES)
    except (WireError, OSError):
        return False
    if not handshake.is_confirmed(confirmation, greeting, answer, service.key):
        raise WireError("it does not have the key")
    return True


def packed(tree: Any, arrays: list[np.ndarray]) -> Any:
    """A tree of arrays as plain JSON values; its arrays are appended to `arrays`."""
    if isinstance(tree, Weighted):
        return {"weighted": [packed(part, arrays) for part in tree]}
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
    if "weighted" in plain:
        return Weighted(*(unpacked(part, arrays) for part in plain["weighted"]))
    if "tuple" in plain:
        return tuple(unpacked(part, arrays) for part in plain["tuple"])
    return {name: unpacked(part, arrays) for name, part in plain["dict"]}
