"""Rendezvous of Horovod's processes, without `horovodrun`: by a server of rank 0, while Horovod starts."""

from __future__ import annotations

import contextlib
import errno
import http.client
import socket
import sys
import threading
import time
from collections.abc import Iterator
from http import HTTPStatus

from isotrain.adapters.horovod.private_api import (
    ADDRESS_BYTES,
    ALL_ARRIVED,
    ARRIVALS,
    NO_ADDRESS,
    RendezvousRelay,
    RendezvousServer,
)
from isotrain.plugin import IsotrainError, PeerLostError, PlanError, ProcessContext

_LOOPBACK = "127.0.0.1"
_POLL_S = 0.02
_REQUEST_TIMEOUT_S = 5.0
_INTERRUPTED = threading.Event()
"""Set while this process is to wait for no other process."""
_RELAYS: list[InterruptibleRelay] = []
"""Relay of the start that is going on, if there is one."""


@contextlib.contextmanager
def rendezvous(context: ProcessContext, timeout: float) -> Iterator[tuple[str, int]]:
    """Context for Horovod's start: rank 0 runs the rendezvous server, other ranks wait for it.

    Args:
        context: Context of this process.
        timeout: Seconds in which all processes must arrive, unless the context says how many.

    Yields:
        Host and port that Horovod is to ask.

    Raises:
        PlanError: The rendezvous port is in use.
        PeerLostError: A process did not arrive, or is lost.
    """
    timeout = context.join_seconds or timeout
    deadline = time.monotonic() + timeout
    host, port = context.rendezvous
    with contextlib.ExitStack() as cleanup:
        if context.rank == 0:
            server = _open_server(host, port)
            cleanup.callback(server.stop)
            _await_arrivals(server, context.world_size, deadline, timeout)
            server.set_all_arrived()
        else:
            _announce(context, deadline, timeout)
        if context.join_seconds is None:
            yield host, port
            return
        relay = InterruptibleRelay(host, port)
        cleanup.callback(relay.stop)
        _RELAYS.append(relay)
        cleanup.callback(_RELAYS.clear)
        if _INTERRUPTED.is_set():
            relay.interrupt()
        yield _LOOPBACK, relay.server_port


def interrupt() -> None:
    """Ends the wait for other processes while Horovod starts. Local; on any thread."""
    _INTERRUPTED.set()
    for relay in tuple(_RELAYS):
        relay.interrupt()


def allow_waiting() -> None:
    """Lets the next start wait for other processes. Local."""
    _INTERRUPTED.clear()


class InterruptibleRelay(RendezvousRelay):
    """Relay between this process's Horovod and rank 0's server; makes Horovod's start fail on request.

    Horovod waits in native code, which nothing else interrupts: for addresses, and at its own sockets for
    processes that are to connect. Once interrupted, the relay answers every request with something that is
    no address, and connects to these sockets itself, to hang up at once.
    """

    def __init__(self, host: str, port: int) -> None:
        """Starts.

        Args:
            host: Host of rank 0's server.
            port: Its port.
        """
        self._server = host, port
        self._is_interrupted = False
        self._listening: list[bytes] = []
        """Addresses at which this process waits for others."""
        self._lock = threading.Lock()
        super().__init__(_LOOPBACK, 0)

    def interrupt(self) -> None:
        """Makes the start fail. Local; on any thread."""
        self._is_interrupted = True
        with self._lock:
            listening, self._listening = self._listening, []
        for address in listening:
            with contextlib.suppress(OSError):  # a process has connected already
                socket.create_connection(_host_and_port(address)).close()

    def read(self, path: str) -> bytes | None:
        try:
            if not self._is_interrupted:
                status, value = _request(*self._server, "GET", path)
                return value if status == HTTPStatus.OK else None
        except (OSError, http.client.HTTPException):
            pass  # rank 0 is lost
        return NO_ADDRESS

    def write(self, path: str, value: bytes) -> None:
        if not len(value) % ADDRESS_BYTES:
            starts = range(0, len(value), ADDRESS_BYTES)
            with self._lock:
                self._listening += [value[start : start + ADDRESS_BYTES] for start in starts]
        if self._is_interrupted:
            self.interrupt()
        try:
            _request(*self._server, "PUT", path, value)
        except (OSError, http.client.HTTPException):  # the others will not find this process
            self.interrupt()


def _host_and_port(address: bytes) -> tuple[str, int]:
    """Host and port in a `struct sockaddr_storage`."""
    family = int.from_bytes(address[:2], sys.byteorder)
    host = address[4:8] if family == socket.AF_INET else address[8:24]
    return socket.inet_ntop(family, host), int.from_bytes(address[2:4], "big")


def _open_server(host: str, port: int) -> RendezvousServer:
    try:
        return RendezvousServer(host, port)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise PlanError(
                f"Port {port} on {host} is already in use, and Horovod's rendezvous needs it."
                " End the program that uses it, or choose another port."
            ) from error
        raise IsotrainError(f"Cannot listen on {host}:{port}: {error}.") from error


def _await_arrivals(
    server: RendezvousServer, world_size: int, deadline: float, timeout: float
) -> None:
    while missing := server.missing(world_size):
        _require_not_interrupted()
        if time.monotonic() > deadline:
            ranks = ", ".join(map(str, missing))
            raise PeerLostError(
                f"Of {world_size} processes, rank {ranks} did not come within {timeout:g} s."
            )
        time.sleep(_POLL_S)


def _announce(context: ProcessContext, deadline: float, timeout: float) -> None:
    """Announces this rank to rank 0, and waits until all ranks have arrived.

    Horovod itself would end the process without an error if rank 0's server were late or stopped.
    """
    host, port = context.rendezvous
    is_announced = False
    while True:
        try:
            if not is_announced:
                status, _ = _request(host, port, "PUT", f"/{ARRIVALS}/{context.rank}", b"here")
                is_announced = status == HTTPStatus.OK
            elif _request(host, port, "GET", f"/{ARRIVALS}/{ALL_ARRIVED}")[0] == HTTPStatus.OK:
                return
            problem = "not all processes have arrived"
        except (OSError, http.client.HTTPException) as error:
            problem = str(error)
        _require_not_interrupted()
        if time.monotonic() > deadline:
            raise PeerLostError(
                f"Rank {context.rank} waited {timeout:g} s for rank 0 at {host}:{port}: {problem}."
            )
        time.sleep(_POLL_S)


def _require_not_interrupted() -> None:
    if _INTERRUPTED.is_set():
        raise PeerLostError("a member of the process group is lost")


def _request(
    host: str, port: int, method: str, path: str, body: bytes | None = None
) -> tuple[int, bytes]:
    """Status and body of the answer to an HTTP request."""
    connection = http.client.HTTPConnection(host, port, timeout=_REQUEST_TIMEOUT_S)
    try:
        connection.request(method, path, body=body)
        response = connection.getresponse()
        return response.status, response.read()
    finally:
        connection.close()
