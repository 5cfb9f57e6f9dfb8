"""TCP ports of this machine, leased for the processes of a run."""

from __future__ import annotations

import atexit
import secrets
import socket
from collections.abc import Callable, Sequence

from isotrain.core.contracts.process import LOCALHOST, Address
from isotrain.core.errors import PlanError

PORTS = range(15000, 32000)
"""Range for automatic choice, below Linux's ephemeral ports."""
_HIGHEST_PORT = 65535
_SEARCH_SPAN = 1000
"""Number of ports that `Ports.take_after` tries."""


class Ports:
    """Leased ports of one address, which no other run on this machine takes meanwhile.

    A lease is a Unix socket bound to a name in the kernel's abstract namespace: it ends with this process.
    """

    def __init__(self, address: str = LOCALHOST) -> None:
        self._address = address
        self._leases: dict[int, socket.socket] = {}

    def take(self, count: int, first: int | None = None) -> tuple[int, ...]:
        """Leases `count` ports.

        Args:
            count: Number of ports.
            first: First of consecutive ports; None: any that are free.

        Returns:
            Port numbers.

        Raises:
            PlanError: A requested port is in use, or too few are free.
        """
        if first is not None:
            require_port(first, _HIGHEST_PORT + 1 - count)
            return tuple(self._require_free(port) for port in range(first, first + count))
        start = secrets.randbelow(len(PORTS))
        return self._first_free(count, (*PORTS[start:], *PORTS[:start]))

    def take_after(self, port: int, count: int) -> tuple[int, ...]:
        """Leases the first `count` free ports after a port.

        Raises:
            PlanError: Fewer of the next 999 are free.
        """
        return self._first_free(count, range(port + 1, min(port + _SEARCH_SPAN, _HIGHEST_PORT) + 1))

    def take_one_of(self, ports: Sequence[int]) -> int | None:
        """Leases the first free port of a sequence; None if none is free."""
        return next((port for port in ports if self._lease(port) is None), None)

    def _first_free(self, count: int, candidates: Sequence[int]) -> tuple[int, ...]:
        taken = (port for port in candidates if self._lease(port) is None)
        ports = tuple(port for _, port in zip(range(count), taken, strict=False))
        if len(ports) < count:
            between = f"between {min(candidates)} and {max(candidates)}" if candidates else "there"
            raise PlanError(f"no {count} free ports {between}.")
        return ports

    def _require_free(self, port: int) -> int:
        problem = self._lease(port)
        if problem is not None:
            raise PlanError(
                f"port {port} of {self._address} cannot be used: {problem}. Choose another with --port"
                " (port= in Python), or leave it out and a free one is found."
            )
        return port

    def _lease(self, port: int) -> str | None:
        """Leases a port; returns None, or the reason why it is not available."""
        lease = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            lease.bind(f"\0isotrain-port-{port}")
        except OSError:
            lease.close()
            return "another run has it"
        try:
            _listen_once((self._address, port))
        except OSError as error:
            lease.close()
            return (error.strerror or str(error)).lower()
        self._leases[port] = lease
        return None

    def release(self, port: int) -> None:
        """Releases the lease of a port."""
        self._leases.pop(port).close()

    def close(self) -> None:
        """Releases all leases."""
        for lease in self._leases.values():
            lease.close()
        self._leases.clear()


def require_port(port: int, highest: int = _HIGHEST_PORT) -> None:
    """Checks that a number is a port from 1 to `highest`.

    Raises:
        PlanError: It is not.
    """
    if not 0 < port <= highest:
        raise PlanError(f"port: expected 1 to {highest}, received {port}.")


def _listen_once(address: Address) -> None:
    """Listens on an address and closes it again; connections in TIME_WAIT do not count as in use.

    Raises:
        OSError: Listening is not possible.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind(address)
        probe.listen()


class PortLeases:
    """Port leases of this process for the runs that it joins; a backend's port is kept until it ends.

    A lease ends with its object: a framework's server keeps its port.
    """

    def __init__(self, ports: Callable[[str], Ports] = Ports) -> None:
        """Starts without leases; `ports` makes the leases on an address."""
        self._ports = ports
        self._leases: list[Ports] = []
        self._extra: Ports | None = None
        self._rendezvous: Ports | None = None
        self._backends: dict[tuple[str, str], tuple[int | None, int]] = {}
        """Backend and address to the requested port and the leased port."""

    def backend(self, name: str, address: str, requested: int | None) -> int:
        """The port of a backend's own server, the same for all its runs in this process.

        Args:
            name: Backend name. Each backend has its own port: a server may live until the process ends.
            address: Address to listen on; empty: all addresses of this host.
            requested: Take the first free port after this one; None: any.

        Raises:
            PlanError: An earlier run requested another port.
        """
        key = (name, address)
        if key not in self._backends:
            self._leases.append(self._ports(address))
            self._backends[key] = requested, _take(self._leases[-1], 1, requested)[0]
        earlier, port = self._backends[key]
        if requested not in (None, earlier):
            raise PlanError(
                f"port: this process keeps {port} for {name}, since an earlier run; received"
                f" {requested}. Give all its runs the same --port (port= in Python), or none."
            )
        return port

    def rendezvous(self, address: str, candidates: Sequence[int]) -> list[int]:
        """Candidate ports of rank 0's server, the leased one first; ends the earlier run's lease."""
        if self._rendezvous is not None:
            self._rendezvous.close()
        self._rendezvous = self._ports(address)
        leased = self._rendezvous.take_one_of(candidates)
        first = [] if leased is None else [leased]
        return [*first, *(port for port in candidates if port != leased)]

    def extra_ports(self, address: str, count: int, requested: int | None) -> list[Address]:
        """Addresses of rank 0's extra servers in one run; ends the earlier run's leases."""
        if self._extra is not None:
            self._extra.close()
        self._extra = self._ports(address)
        return [(address, port) for port in _take(self._extra, count, requested)] if count else []

    def close(self) -> None:
        """Releases all leases, at the end of this process."""
        for ports in (*self._leases, self._extra, self._rendezvous):
            if ports is not None:
                ports.close()


def _take(ports: Ports, count: int, requested: int | None) -> tuple[int, ...]:
    return ports.take(count) if requested is None else ports.take_after(requested, count)


PORT_LEASES = PortLeases()
"""Port leases of this process."""
atexit.register(PORT_LEASES.close)
