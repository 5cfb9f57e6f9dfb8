"""Framed messages between processes of a run: a JSON header and NumPy arrays over TCP, without pickle."""

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
_NO_ENCRYPTION = EncryptionOffer()


class ConnectionLostError(PeerLostError):
    """The other end is gone, or does not follow the protocol."""


class Connection:
    """A connection that sends and receives whole messages."""

    def __init__(
        self,
        connection: socket.socket,
        macs: MacPair | None = None,
        tls: TlsEndpoint | None = None,
    ) -> None:
        """Wraps an authenticated socket: both ends have proved that they have the key."""
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket = connection
        self._macs = macs
        self._tls = tls
        self._limit = UNAUTHENTICATED_LIMIT if macs is None else HEADER_LIMIT

    def fileno(self) -> int:
        """File descriptor, for selectors."""
        return self._socket.fileno()

    def send(self, header: Mapping[str, Any], arrays: Sequence[np.ndarray] = ()) -> None:
        """Sends JSON values and arrays of any shapes and dtypes; blocks until the socket has taken all of it.

        Raises:
            ConnectionLostError: The other end is gone.
            IsotrainError: The header is longer than the limit; nothing was sent.
        """
        kinds = [
            [array.dtype.str, array.shape] for array in arrays
        ]  # before ascontiguousarray gives a scalar one dimension
        arrays = [np.ascontiguousarray(array) for array in arrays]
        text = json.dumps({**header, "arrays": kinds}).encode()
        if len(text) > self._limit:
            raise IsotrainError(
                f"a message of {len(text)} bytes cannot be sent, at most {self._limit}. Return less from the"
                " processes of a run, or numbers as NumPy arrays, which have no limit."
            )
        views = [array.reshape(-1).view(np.uint8).data for array in arrays if array.size]
        parts: list[bytes | memoryview] = [LENGTH.pack(len(text)) + text, *views]
        if self._macs is not None:
            parts.append(self._macs.sending.compute(parts))
        with _as_connection_lost(OSError):
            for part in parts:
                self._send_bytes(part)

    def _send_bytes(self, part: Bytes) -> None:
        for chunk in [part] if self._tls is None else self._tls.encrypted(part):
            self._socket.sendall(chunk)

    def receive(self) -> tuple[dict[str, Any], list[np.ndarray]]:
        """Waits for one message, on a connection without MACs.

        Returns:
            The header, and the arrays with the shapes and dtypes that were sent.

        Raises:
            ConnectionLostError: The other end is gone.
        """
        assert self._macs is None, "messages with a MAC are read by MessageReader"
        with _as_connection_lost(OSError, ValueError, KeyError, TypeError):
            header = json.loads(self._receive_header())
            arrays = [np.empty(shape, np.dtype(kind)) for kind, shape in header.pop("arrays")]
            for array in arrays:
                if array.size:
                    _receive_into(array.reshape(-1).view(np.uint8).data, self._socket)
        return header, arrays

    def _receive_header(self) -> bytes:
        (length,) = LENGTH.unpack(_receive_exactly(self._socket, LENGTH.size))
        if length > self._limit:
            raise ConnectionLostError(
                f"expected a message header of at most {self._limit} bytes, received a length of {length}"
            )
        return _receive_exactly(self._socket, length)

    @property
    def local_address(self) -> str:
        """IP address of this end."""
        return str(self._socket.getsockname()[0])

    def reader(self) -> MessageReader:
        """Non-blocking reader of this connection; do not call `receive` beside it."""
        mac = None if self._macs is None else self._macs.receiving
        return MessageReader(self._socket, mac, self._tls)

    def limit_sending(self, seconds: float) -> None:
        """Sets the send timeout (SO_SNDTIMEO): `send` fails if the other end reads nothing for so long."""
        limit = struct.pack("ll", int(seconds), int(seconds % 1 * 1e6))
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)

    def shutdown_write(self) -> None:
        """Closes the sending direction: the other end reads what was sent, then the end of the stream."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_WR)

    def shutdown(self) -> None:
        """Closes both directions, and keeps the descriptor; both ends notice at once."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Closes the connection; the other end notices at once."""
        self.shutdown()
        self._socket.close()


@contextlib.contextmanager
def _as_connection_lost(*error_types: type[Exception]) -> Iterator[None]:
    try:
        yield
    except error_types as error:
        raise ConnectionLostError(f"its connection failed: {error}") from error


def _receive_exactly(connection: socket.socket, length: int) -> bytes:
    data = bytearray(length)
    _receive_into(memoryview(data), connection)
    return bytes(data)


def _receive_into(view: memoryview, connection: socket.socket) -> None:
    while view:
        count = connection.recv_into(view)
        if not count:
            raise ConnectionLostError("its connection was closed")
        view = view[count:]


def connect(server_connection: ServerConnection) -> Connection:
    """Connects to the coordinator of a parameter-server run as soon as it listens.

    Waits without a limit until it listens: the launcher ends processes that wait in vain. The coordinator
    drops a client that answers too slowly, so the client retries for `start_timeout` seconds.

    Raises:
        ConnectionLostError: The coordinator has another key, or is gone.
    """
    connection = _connect_when_listening(server_connection.server_address)
    deadline = time.monotonic() + server_connection.start_timeout
    try:
        while not authenticate(connection, server_connection.key, server_connection.context.rank):
            connection.close()
            if time.monotonic() > deadline:
                raise ConnectionLostError(
                    f"it accepted no client for {server_connection.start_timeout:g} s"
                )
            time.sleep(_RETRY_SECONDS)
            connection = socket.create_connection(server_connection.server_address)
    except (ConnectionLostError, OSError) as error:
        connection.close()
        raise ConnectionLostError(
            f"the coordinator at {server_connection.server_address} is gone, or belongs to another run"
        ) from error
    return Connection(connection)


def _connect_when_listening(address: tuple[str, int]) -> socket.socket:
    while True:
        try:
            return socket.create_connection(address)
        except ConnectionRefusedError:
            time.sleep(_RETRY_SECONDS)


def authenticate(
    connection: socket.socket, key: bytes, rank: int, offer: EncryptionOffer = _NO_ENCRYPTION
) -> tuple[bytes, EncryptionOffer] | None:
    """The client's side of the challenge-response (`auth`), with rank 0 as the server.

    Returns:
        The session key and the encryption offer of rank 0; None if rank 0 closed the connection first.

    Raises:
        ConnectionLostError: The server does not have the run's key.
    """
    try:
        challenge = _receive_exactly(connection, auth.CHALLENGE_BYTES)
        answer = auth.answer_challenge(challenge, key, rank, offer)
        connection.sendall(answer)
        confirmation = _receive_exactly(connection, auth.CONFIRMATION_BYTES)
    except (ConnectionLostError, OSError):
        return None
    server_offer = auth.verify_confirmation(confirmation, challenge, answer, key)
    if server_offer is None:
        raise ConnectionLostError("the server there has another key")
    return auth.session_key(challenge, answer, key), server_offer
