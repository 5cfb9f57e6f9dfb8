"""Where rank 0 of a joined run lets the others in, and how they find it."""

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
"""For a call when the time is over: it may just begin to be answered."""
_BETWEEN_ROUNDS_SECONDS = 0.1
LONG_WAIT_SECONDS = 5.0
"""After which a process says whom it waits for."""
_PLAIN = EncryptionOffer()


class RankZeroServer:
    """Rank 0's door, at the first of some ports that is free.

    Attributes:
        location: Where it is, for messages.
    """

    def __init__(
        self, address: str, ports: Sequence[int], key: bytes, terms: EncryptionOffer = _PLAIN
    ) -> None:
        """Listens.

        Args:
            address: To listen on; empty for all of this machine's.
            ports: To try, in order.
            key: Of the run.
            terms: Whether this process encrypts.

        Raises:
            PlanError: None of them is free.
        """
        self._door = _opened(address, ports, key, terms)
        self.location = f"port {self._door.address[1]} of {address or socket.gethostname()}"

    @property
    def refused(self) -> int:
        """Callers that could not prove that they have the key."""
        return self._door.refused

    @property
    def rejected(self) -> dict[int, str]:
        """Why ranks that have come cannot be talked with; they know."""
        return dict(self._door.rejected)

    def arrivals(self) -> list[tuple[int, Connection]]:
        """Ranks and connections of those who came since the last call."""
        return self._door.arrivals()

    def close(self) -> None:
        """Listens no more."""
        self._door.close()


def _opened(
    address: str, ports: Sequence[int], key: bytes, terms: EncryptionOffer
) -> AuthenticatedServer:
    problems = {}
    for port in ports:
        try:
            return AuthenticatedServer((address, port), key, terms=terms)
        except OSError as error:
            problems[port] = (error.strerror or str(error)).lower()
    told = "; ".join(f"{port}: {problem}" for port, problem in problems.items())
    raise PlanError(
        f"rank 0 can listen on none of the ports where the others look for it, on"
        f" {address or 'this machine'}: {told}. Choose another with --port (port= in Python)."
    )


def _say_nothing() -> None:
    """For who waits unseen."""


def connect_to_rank_zero(
    host: str,
    ports: Sequence[int],
    key: bytes,
    rank: int,
    seconds: float,
    terms: EncryptionOffer = _PLAIN,
    on_long_wait: Callable[[], None] = _say_nothing,
) -> Connection:
    """Calls at rank 0's door until it lets this process in.

    Args:
        host: Of rank 0.
        ports: One of which it listens on.
        key: Of the run.
        rank: Of this process.
        seconds: To keep trying.
        terms: Whether this process encrypts; one that was told to and cannot tells rank 0 so.
        on_long_wait: Called once, after 5 s.

    Raises:
        PeerLostError: Nobody there let it in.
        PlanError: It is rank 0, and the two cannot talk.
    """
    began, is_said = time.monotonic(), False
    deadline = began + seconds
    while True:
        problems: dict[str, None] = {}
        for port in ports:
            left = deadline - time.monotonic()
            found = _tried((host, port), key, rank, left, terms)
            if isinstance(found, Connection):
                return found
            problems[found] = None
        if time.monotonic() > deadline:
            terms.require_available()
            listed = ", ".join(map(str, ports))
            raise PeerLostError(
                f"rank {rank} did not find rank 0 at {host}, ports {listed}, in {seconds:g} s"
                f" (timeouts.start): {'; '.join(problems)}. Was rank 0 started, can this host,"
                f" {socket.gethostname()}, reach it there, and has it the same key?"
            )
        if not is_said and time.monotonic() > began + LONG_WAIT_SECONDS:
            is_said = True
            on_long_wait()
        time.sleep(_BETWEEN_ROUNDS_SECONDS)


def _tried(
    address: Address, key: bytes, rank: int, left: float, terms: EncryptionOffer
) -> Connection | str:
    """A connection, or why there is none."""
    limit = max(LAST_SECONDS, min(_HANDSHAKE_SECONDS, left))
    try:
        connection = socket.create_connection(address, limit)
    except OSError as error:
        return (error.strerror or str(error)).lower()
    wire = None
    problem = "who listens there turned this process away, or was too slow"
    try:
        with _limited(connection, limit):
            wire = client_handshake(connection, key, rank, terms)
    except ConnectionLostError as error:
        problem = str(error)
    finally:
        if wire is None:
            connection.close()
    if wire is None:
        return problem
    connection.settimeout(None)
    return wire


@contextlib.contextmanager
def _limited(connection: socket.socket, seconds: float) -> Iterator[None]:
    """Ends a connection that takes longer: its own timeout counts from each part that comes."""

    def end() -> None:
        with contextlib.suppress(OSError):
            connection.shutdown(socket.SHUT_RDWR)

    timer = threading.Timer(seconds, end)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
