"""Rank 0's server in the rendezvous of processes that were started from outside, and the way to it."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence

from isotrain.core.contracts.process import Address
from isotrain.core.errors import PeerLostError, PlanError
from isotrain.core.transport.client import client_handshake
from isotrain.core.transport.connection import Connection, ConnectionLostError
from isotrain.core.transport.encryption import EncryptionOffer
from isotrain.core.transport.server import AuthenticatedServer

_HANDSHAKE_SECONDS = 5.0
LAST_SECONDS = 1.0
"""Shortest timeout of an attempt, even when the time is over: rank 0 may just have begun to listen."""
_BETWEEN_ROUNDS_SECONDS = 0.1
LONG_WAIT_SECONDS = 5.0
"""Seconds after which a process reports which ranks it waits for."""
_NO_ENCRYPTION = EncryptionOffer()


class RankZeroServer:
    """Rank 0's server, on the first free one of several ports.

    Attributes:
        location: Port and host of the server, as text for messages.
    """

    def __init__(
        self,
        address: str,
        ports: Sequence[int],
        key: bytes,
        offer: EncryptionOffer = _NO_ENCRYPTION,
    ) -> None:
        """Listens on an address (empty: all of this host), on the first free one of the ports.

        Raises:
            PlanError: None of the ports is free.
        """
        self._server = _listen(address, ports, key, offer)
        self.location = f"port {self._server.address[1]} of {address or socket.gethostname()}"

    @property
    def rejected_clients(self) -> int:
        """Number of clients rejected so far; most could not prove that they have the key."""
        return self._server.rejected_clients

    @property
    def rejected(self) -> dict[int, str]:
        """Reasons why ranks of this run were rejected, by rank; those ranks have been told."""
        return dict(self._server.rejected)

    def arrivals(self) -> list[tuple[int, Connection]]:
        """Ranks and connections of the clients accepted since the last call."""
        return self._server.arrivals()

    def close(self) -> None:
        """Stops listening."""
        self._server.close()


def _listen(
    address: str, ports: Sequence[int], key: bytes, offer: EncryptionOffer
) -> AuthenticatedServer:
    problems = {}
    for port in ports:
        try:
            return AuthenticatedServer((address, port), key, offer=offer)
        except OSError as error:
            problems[port] = (error.strerror or str(error)).lower()
    listed = "; ".join(f"{port}: {problem}" for port, problem in problems.items())
    raise PlanError(
        f"rank 0 cannot listen on any of the ports where the other ranks expect it, on"
        f" {address or 'this machine'}: {listed}. Choose another with --port (port= in Python)."
    )


def _do_nothing() -> None:
    """Default of `on_long_wait`."""


def connect_to_rank_zero(
    host: str,
    ports: Sequence[int],
    key: bytes,
    rank: int,
    seconds: float,
    offer: EncryptionOffer = _NO_ENCRYPTION,
    on_long_wait: Callable[[], None] = _do_nothing,
) -> Connection:
    """Connects to rank 0, and retries for so many seconds; `on_long_wait` is called once, after 5 s.

    Raises:
        PeerLostError: No server there accepted this process in time.
        PlanError: The encryption offers do not match, or a certificate is rejected.
    """
    began, is_long = time.monotonic(), False
    deadline = began + seconds
    while True:
        problems: dict[str, None] = {}
        for port in ports:
            remaining = deadline - time.monotonic()
            result = _attempt((host, port), key, rank, remaining, offer)
            if isinstance(result, Connection):
                return result
            problems[result] = None
        if time.monotonic() > deadline:
            offer.require_available()
            listed = ", ".join(map(str, ports))
            raise PeerLostError(
                f"rank {rank} did not find rank 0 at {host}, ports {listed}, in {seconds:g} s"
                f" (timeouts.start): {'; '.join(problems)}. Was rank 0 started, can this host,"
                f" {socket.gethostname()}, reach it there, and has it the same key?"
            )
        if not is_long and time.monotonic() > began + LONG_WAIT_SECONDS:
            is_long = True
            on_long_wait()
        time.sleep(_BETWEEN_ROUNDS_SECONDS)


def _attempt(
    address: Address, key: bytes, rank: int, remaining: float, offer: EncryptionOffer
) -> Connection | str:
    """One attempt within `remaining` seconds: a connection, or why there is none."""
    limit = max(LAST_SECONDS, min(_HANDSHAKE_SECONDS, remaining))
    try:
        connection = socket.create_connection(address, limit)
    except OSError as error:
        return (error.strerror or str(error)).lower()
    authenticated = None
    problem = "the server there rejected this process, or was too slow"
    try:
        with _limited(connection, limit):
            authenticated = client_handshake(connection, key, rank, offer)
    except ConnectionLostError as error:
        problem = str(error)
    finally:
        if authenticated is None:
            connection.close()
    if authenticated is None:
        return problem
    connection.settimeout(None)
    return authenticated


@contextlib.contextmanager
def _limited(connection: socket.socket, seconds: float) -> Iterator[None]:
    """Limits the total time of a handshake: the socket's own timeout starts anew with each read."""

    def shutdown() -> None:
        with contextlib.suppress(OSError):
            connection.shutdown(socket.SHUT_RDWR)

    timer = threading.Timer(seconds, shutdown)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
