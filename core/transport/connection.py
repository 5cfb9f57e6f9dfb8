"""Messages between processes of a run: a JSON header and arrays over TCP, without pickle."""

from __future__ import annotations

import contextlib
import json
import socket
import struct
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from isotrain.core.contracts.process import ServerConnection
from isotrain.core.data.pytree import Weighted
from isotrain.core.errors import IsotrainError, PeerLostError
from isotrain.core.transport import auth
from isotrain.core.transport.encryption import EncryptionOffer
from isotrain.core.transport.message_auth import Bytes, MacPair
from isotrain.core.transport.message_reader import (
    HEADER_LIMIT,
    LENGTH,
    UNAUTHENTICATED_LIMIT,
    MessageReader,
)

if TYPE_CHECKING:
    from isotrain.core.transport.tls import TlsEndpoint

_RETRY_SECONDS = 0.05
_PLAIN = EncryptionOffer()


class ConnectionLostError(PeerLostError):
    """The other end is gone, or says what nobody says here."""


class Connection:
    """One connection, to send and receive messages whole."""

    def __init__(
        self,
        connection: socket.socket,
        seals: MacPair | None = None,
        tls: TlsEndpoint | None = None,
    ) -> None:
        """Takes a connection.

        Args:
            connection: On which both ends have proved that they have the key.
            seals: Of its messages; None: they have none.
            tls: Encrypts it; None: nothing does.
        """
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket = connection
        self._seals = seals
        self._tls = tls
        self._limit = UNAUTHENTICATED_LIMIT if seals is None else HEADER_LIMIT

    def fileno(self) -> int:
        """For selectors."""
        return self._socket.fileno()

    def send(self, header: Mapping[str, Any], arrays: Sequence[np.ndarray] = ()) -> None:
        """Sends one message.

        Raises:
            ConnectionLostError: The other end is gone.
            IsotrainError: The header is longer than the other end would take; nothing was sent.
        """
        kinds = [
            [array.dtype.str, array.shape] for array in arrays
        ]  # before a number becomes a row
        arrays = [np.ascontiguousarray(array) for array in arrays]
        text = json.dumps({**header, "arrays": kinds}).encode()
        if len(text) > self._limit:
            raise IsotrainError(
                f"a message of {len(text)} bytes cannot be sent, at most {self._limit}. Return less from the"
                " processes of a run, or numbers as NumPy arrays, which have no limit."
            )
        views = [array.reshape(-1).view(np.uint8).data for array in arrays if array.size]
        parts: list[bytes | memoryview] = [LENGTH.pack(len(text)) + text, *views]
        if self._seals is not None:
            parts.append(self._seals.sending.of(parts))
        with _told(OSError):
            for part in parts:
                self._put(part)

    def _put(self, part: Bytes) -> None:
        for piece in [part] if self._tls is None else self._tls.encrypted(part):
            self._socket.sendall(piece)

    def receive(self) -> tuple[dict[str, Any], list[np.ndarray]]:
        """Waits for one message: its header and its arrays.

        Raises:
            ConnectionLostError: The other end is gone.
        """
        assert self._seals is None, "sealed messages are read by the inbox"
        with _told(OSError, ValueError, KeyError, TypeError):
            header = json.loads(self._receive_text())
            arrays = [np.empty(shape, np.dtype(kind)) for kind, shape in header.pop("arrays")]
            for array in arrays:
                if array.size:
                    _fill(array.reshape(-1).view(np.uint8).data, self._socket)
        return header, arrays

    def _receive_text(self) -> bytes:
        (length,) = LENGTH.unpack(_receive_exactly(self._socket, LENGTH.size))
        if length > self._limit:
            raise ConnectionLostError(
                f"a message of {length} bytes was announced, at most {self._limit} are right"
            )
        return _receive_exactly(self._socket, length)

    @property
    def here(self) -> str:
        """The address of this end."""
        return str(self._socket.getsockname()[0])

    def reader(self) -> MessageReader:
        """What comes in, to be read without waiting, and not by `receive` any more."""
        seal = None if self._seals is None else self._seals.receiving
        return MessageReader(self._socket, seal, self._tls)

    def limit_sending(self, seconds: float) -> None:
        """Has `send` give up when the other end takes nothing in for so long."""
        limit = struct.pack("ll", int(seconds), int(seconds % 1 * 1e6))
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)

    def shutdown_write(self) -> None:
        """Lets the other end read what was sent, and then notice that nothing will follow."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_WR)

    def shutdown(self) -> None:
        """Lets nothing through any more; both ends notice at once."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Ends the connection; the other end notices at once."""
        self.shutdown()
        self._socket.close()


@contextlib.contextmanager
def _told(*kinds: type[Exception]) -> Iterator[None]:
    try:
        yield
    except kinds as error:
        raise ConnectionLostError(f"its connection failed: {error}") from error


def _receive_exactly(connection: socket.socket, length: int) -> bytes:
    data = bytearray(length)
    _fill(memoryview(data), connection)
    return bytes(data)


def _fill(view: memoryview, connection: socket.socket) -> None:
    while view:
        count = connection.recv_into(view)
        if not count:
            raise ConnectionLostError("its connection was closed")
        view = view[count:]


def connect(server_connection: ServerConnection) -> Connection:
    """Connects to the coordinator as soon as it listens; the launcher ends whom it leaves waiting.

    A caller that is too slow to answer is dropped, so it calls again while the coordinator listens, for
    as long as that waits for its workers.

    Args:
        server_connection: Of the process that connects; tells where to, with which key, and as which rank.

    Raises:
        ConnectionLostError: The coordinator has another key, or is gone.
    """
    connection = _reached(server_connection.server_address)
    deadline = time.monotonic() + server_connection.start_timeout
    try:
        while not authenticate(connection, server_connection.key, server_connection.context.rank):
            connection.close()
            if time.monotonic() > deadline:
                raise ConnectionLostError(
                    f"it let nobody in for {server_connection.start_timeout:g} s"
                )
            time.sleep(_RETRY_SECONDS)
            connection = socket.create_connection(server_connection.server_address)
    except (ConnectionLostError, OSError) as error:
        connection.close()
        raise ConnectionLostError(
            f"the coordinator at {server_connection.server_address} is gone, or of another run"
        ) from error
    return Connection(connection)


def _reached(address: tuple[str, int]) -> socket.socket:
    while True:
        try:
            return socket.create_connection(address)
        except ConnectionRefusedError:
            time.sleep(_RETRY_SECONDS)


def authenticate(
    connection: socket.socket, key: bytes, rank: int, terms: EncryptionOffer = _PLAIN
) -> tuple[bytes, EncryptionOffer] | None:
    """Proves that this process has the key; None where the other end hung up before that was done.

    Args:
        connection: To rank 0.
        key: Of the run.
        rank: Of this process.
        terms: Of this process.

    Returns:
        What only both ends know of this connection, and the terms of rank 0.

    Raises:
        ConnectionLostError: It is no rank 0 of this run.
    """
    try:
        greeting = _receive_exactly(connection, auth.GREETING_BYTES)
        answer = auth.answer_to(greeting, key, rank, terms)
        connection.sendall(answer)
        confirmation = _receive_exactly(connection, auth.CONFIRMATION_BYTES)
    except (ConnectionLostError, OSError):
        return None
    found = auth.confirmed(confirmation, greeting, answer, key)
    if found is None:
        raise ConnectionLostError("who listens there has another key")
    return auth.session(greeting, answer, key), found


def encode_tree(tree: Any, arrays: list[np.ndarray]) -> Any:
    """A tree of arrays as plain JSON values; its arrays are appended to `arrays`."""
    if isinstance(tree, Weighted):
        return {"weighted": [encode_tree(part, arrays) for part in tree]}
    if isinstance(tree, tuple):
        return {"tuple": [encode_tree(part, arrays) for part in tree]}
    if isinstance(tree, dict):
        return {"dict": [[name, encode_tree(part, arrays)] for name, part in tree.items()]}
    if tree is None:
        return None
    arrays.append(np.asarray(tree))
    return len(arrays) - 1


def decode_tree(plain: Any, arrays: Sequence[np.ndarray]) -> Any:
    """The tree of which `encode_tree` made these."""
    if plain is None:
        return None
    if isinstance(plain, int):
        return arrays[plain]
    if "weighted" in plain:
        return Weighted(*(decode_tree(part, arrays) for part in plain["weighted"]))
    if "tuple" in plain:
        return tuple(decode_tree(part, arrays) for part in plain["tuple"])
    return {name: decode_tree(part, arrays) for name, part in plain["dict"]}
