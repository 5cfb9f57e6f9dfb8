"""How the replicas exchange: over TCP, through replica 0. It listens where it is told: on loopback."""

from __future__ import annotations

import functools
import socket
import struct
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np

from isotrain.plugin import (
    IsotrainError,
    PeerLostError,
    ProcessContext,
    ReduceOp,
    Subgroups,
    local_subgroup,
)
from isotrain.testing.reference.layers import Array

_LENGTH = struct.Struct("<Q")
_RETRY_SECONDS = 0.01


class Communicator:
    """One replica's ties to all others.

    There is one exchange: everybody gets the arrays of all, in order. What replicas compute of them is
    so the same on each, to the bit.

    Attributes:
        replica: The index of this one.
        replicas: How many there are.
    """

    def __init__(self, context: ProcessContext, timeout: float) -> None:
        """Joins the others; with one replica there are none, and no port is opened.

        Args:
            context: Whose replica this is; the processes meet at its rendezvous.
            timeout: Seconds to wait for another replica, here and in each exchange.
        """
        (self.replica,) = context.local_replicas
        self.replicas = context.replicas
        self._links: list[socket.socket] = []
        if self.replicas > 1:
            host, port = context.rendezvous
            with _told(f"the replicas did not all come to {host}:{port}"):
                join = self._gather_links if self.replica == 0 else self._reach_first
                self._links = join(context.rendezvous, timeout)

    def _gather_links(self, address: tuple[str, int], timeout: float) -> list[socket.socket]:
        """Replica 0: one link to each of the others, in order."""
        found: dict[int, socket.socket] = {}
        with socket.create_server(address, backlog=self.replicas) as door:
            door.settimeout(timeout)
            while len(found) < self.replicas - 1:
                link = _set_up(door.accept()[0], timeout)
                found[_LENGTH.unpack(_receive(link))[0]] = link
        return [found[replica] for replica in sorted(found)]

    def _reach_first(self, address: tuple[str, int], timeout: float) -> list[socket.socket]:
        """The others: one link, to replica 0, which may not listen yet."""
        deadline = time.monotonic() + timeout
        while True:
            try:
                link = _set_up(socket.create_connection(address, timeout), timeout)
                break
            except ConnectionRefusedError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(_RETRY_SECONDS)
        _send(link, _LENGTH.pack(self.replica))
        return [link]

    def all_gather(self, array: Array) -> Array:
        """The arrays of all replicas, shape `[replicas, *shape]`."""
        return np.stack(self._rows(array, range(self.replicas)))

    def _rows(self, array: Array, replicas: Sequence[int]) -> list[Array]:
        """The arrays of some replicas, this one among them, which all have one shape; all exchange."""
        if self.replicas == 1:
            return [np.array(array) for _ in replicas]
        with _told("the exchange with the other replicas failed"):
            messages = self._collect(array.tobytes())
        found = [messages[replica] for replica in replicas]
        if any(len(message) != array.nbytes for message in found):
            raise IsotrainError(
                f"replica {self.replica} exchanges {array.nbytes} bytes, and all {len(found)}"
                f" together {sum(map(len, found))}: every replica must exchange the same, in the same order."
            )
        return [np.frombuffer(each, array.dtype).reshape(array.shape) for each in found]

    def _collect(self, own: bytes) -> list[bytes]:
        if self.replica:
            (link,) = self._links
            _send(link, own)
            return [_receive(link) for _ in range(self.replicas)]
        messages = [own, *map(_receive, self._links)]
        whole = b"".join(map(_framed, messages))
        for link in self._links:
            link.sendall(whole)
        return messages

    def all_reduce(self, array: Array, op: ReduceOp = "sum") -> Array:
        """The sum, mean or maximum over all replicas, in the type of the array."""
        rows = self.all_gather(array)
        if op == "max":
            return np.asarray(rows.max(axis=0))
        total = np.asarray(functools.reduce(np.add, rows))
        return total if op == "sum" else (total / self.replicas).astype(array.dtype)

    def all_reduce_within(self, array: Array, subgroups: Subgroups) -> Array:
        """The sum over the replicas of the own part."""
        part = local_subgroup(self.replica, subgroups) or (self.replica,)
        return np.array(functools.reduce(np.add, self._rows(array, part)))

    def broadcast_within(self, array: Array, subgroups: Subgroups) -> Array:
        """The array of the first replica of the own part."""
        part = local_subgroup(self.replica, subgroups)
        return np.asarray(self.all_gather(array)[part[0] if part else self.replica])

    def barrier(self) -> None:
        """Returns once all have come."""
        self.all_gather(np.zeros(1))

    def close(self) -> None:
        """Leaves the others, once all are here."""
        self.barrier()
        for link in self._links:
            link.close()


def _set_up(link: socket.socket, timeout: float) -> socket.socket:
    link.settimeout(timeout)
    link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return link


def _send(link: socket.socket, message: bytes) -> None:
    link.sendall(_framed(message))


def _framed(message: bytes) -> bytes:
    return _LENGTH.pack(len(message)) + message


def _receive(link: socket.socket) -> bytes:
    return _exactly(link, _LENGTH.unpack(_exactly(link, _LENGTH.size))[0])


def _exactly(link: socket.socket, count: int) -> bytes:
    found = bytearray()
    while len(found) < count:
        part = link.recv(min(count - len(found), 1 << 20))
        if not part:
            raise ConnectionError("the other end is closed")
        found += part
    return bytes(found)


@contextmanager
def _told(what: str) -> Iterator[None]:
    """Says of an error of the system what it means for the replicas."""
    try:
        yield
    except OSError as error:
        raise PeerLostError(f"{what}: connection lost: {error}") from error
