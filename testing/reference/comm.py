"""Communicator of the reference backend: TCP sockets in a star around replica 0.

Replica 0 listens at the rendezvous address of its process context.
"""

from __future__ import annotations

import socket
import struct
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress

import numpy as np

from isotrain.plugin import (
    IsotrainError,
    PeerLostError,
    ProcessContext,
)
from isotrain.testing.reference.layers import Array

_LENGTH = struct.Struct("<Q")
_RETRY_SECONDS = 0.01


class Communicator:
    """Communicator of one replica, connected to all others.

    Every collective is an all-gather through replica 0.

    Attributes:
        replica: Index of this replica.
        replicas: Number of replicas.
    """

    def __init__(self, context: ProcessContext, timeout: float) -> None:
        """Connects to the other replicas. Collective; a single replica opens no port.

        Args:
            context: Context of this process, with its one local replica and the rendezvous address.
            timeout: Seconds to wait for another replica, here and in each collective.

        Raises:
            PeerLostError: The replicas did not all connect in time.
        """
        (self.replica,) = context.local_replicas
        self.replicas = context.replicas
        self._connections: list[socket.socket] = []
        self._is_abandoned = False
        if self.replicas > 1:
            _OPEN.add(self)
            host, port = context.rendezvous
            with _peer_lost(f"the replicas did not all come to {host}:{port}"):
                join = self._accept_others if self.replica == 0 else self._connect_to_first
                join(context.rendezvous, timeout, context.join_seconds or timeout)

    def _accept_others(self, address: tuple[str, int], timeout: float, seconds: float) -> None:
        """Accepts one connection from each other replica, in `seconds`. Replica 0 calls it."""
        connections: dict[int, socket.socket] = {}
        deadline = time.monotonic() + seconds
        with socket.create_server(address, backlog=self.replicas) as server:
            server.settimeout(_RETRY_SECONDS)
            while len(connections) < self.replicas - 1:
                try:
                    connection = _set_up(server.accept()[0], timeout)
                except TimeoutError:
                    self._require_more_time(deadline)
                    continue
                self._connections.append(connection)
                connections[_LENGTH.unpack(_receive(connection))[0]] = connection
        self._connections = [connections[replica] for replica in sorted(connections)]

    def _connect_to_first(self, address: tuple[str, int], timeout: float, seconds: float) -> None:
        """Connects to replica 0, which may not listen yet. All replicas but 0 call it."""
        deadline = time.monotonic() + seconds
        while True:
            try:
                connection = _set_up(socket.create_connection(address, timeout), timeout)
                break
            except ConnectionRefusedError:
                self._require_more_time(deadline)
                time.sleep(_RETRY_SECONDS)
        self._connections.append(connection)
        _send(connection, _LENGTH.pack(self.replica))

    def _require_more_time(self, deadline: float) -> None:
        """Raises the error of replicas that did not come, after the deadline or once abandoned."""
        if self._is_abandoned or time.monotonic() > deadline:
            raise TimeoutError("they were waited for in vain")

    def shut_down(self) -> None:
        """Ends the connections, so that calls fail here and on the other side. Local; on any thread."""
        self._is_abandoned = True
        for connection in self._connections:
            with suppress(OSError):  # not connected any more
                connection.shutdown(socket.SHUT_RDWR)

    def all_gather(self, array: Array) -> Array:
        """Gathers the arrays of all replicas. Collective.

        Args:
            array: Array of any shape and dtype, alike on every replica.

        Returns:
            Array of shape `[replicas, *array.shape]` and the same dtype, in the order of the replicas.

        Raises:
            IsotrainError: The replicas passed arrays of different sizes.
            PeerLostError: A connection was lost, or a replica did not answer in time.
        """
        return np.stack(self.gather(array, range(self.replicas)))

    def gather(self, array: Array, replicas: Sequence[int]) -> list[Array]:
        """Gathers the arrays of the listed replicas, which have one shape. Collective over all replicas.

        Raises:
            IsotrainError: The replicas' arrays differ in size.
        """
        if self.replicas == 1:
            return [np.array(array) for _ in replicas]
        with _peer_lost("the exchange with the other replicas failed"):
            messages = self._collect(array.tobytes())
        requested = [messages[replica] for replica in replicas]
        if any(len(message) != array.nbytes for message in requested):
            raise IsotrainError(
                f"replica {self.replica} sends {array.nbytes} bytes, and all {len(requested)} together"
                f" {sum(map(len, requested))}: every replica must exchange the same, in the same order."
            )
        return [np.frombuffer(each, array.dtype).reshape(array.shape) for each in requested]

    def _collect(self, message: bytes) -> list[bytes]:
        if self.replica:
            (connection,) = self._connections
            _send(connection, message)
            return [_receive(connection) for _ in range(self.replicas)]
        messages = [message, *map(_receive, self._connections)]
        frames = b"".join(map(_framed, messages))
        for connection in self._connections:
            connection.sendall(frames)
        return messages

    def close(self) -> None:
        """Closes the connections after a barrier. Collective."""
        self.all_gather(np.zeros(1))
        _OPEN.discard(self)
        for connection in self._connections:
            connection.close()


_OPEN: set[Communicator] = set()
"""Communicators of this process that are connected."""


def shut_down_all() -> set[Communicator]:
    """Shuts down the communicators of this process, which it returns. Local; on any thread."""
    for communicator in tuple(_OPEN):
        communicator.shut_down()
    return _OPEN


def _set_up(connection: socket.socket, timeout: float) -> socket.socket:
    connection.settimeout(timeout)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return connection


def _send(connection: socket.socket, message: bytes) -> None:
    connection.sendall(_framed(message))


def _framed(message: bytes) -> bytes:
    return _LENGTH.pack(len(message)) + message


def _receive(connection: socket.socket) -> bytes:
    return _exactly(connection, _LENGTH.unpack(_exactly(connection, _LENGTH.size))[0])


def _exactly(connection: socket.socket, count: int) -> bytes:
    received = bytearray()
    while len(received) < count:
        chunk = connection.recv(min(count - len(received), 1 << 20))
        if not chunk:
            raise ConnectionError("the other end is closed")
        received += chunk
    return bytes(received)


@contextmanager
def _peer_lost(what: str) -> Iterator[None]:
    """Raises an `OSError` as `PeerLostError`; `what` says which communication failed."""
    try:
        yield
    except OSError as error:
        raise PeerLostError(f"{what}: connection lost: {error}") from error
