"""Leases on TCP ports of this process, for the runs that it joins; a backend's port is kept until it ends."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from isotrain.core.contracts.process import Address
from isotrain.core.errors import PlanError
from isotrain.core.launching.processes.ports import Ports


class PortLeases:
    """Leases on ports of this host. A lease ends with its object: a framework's server keeps its port."""

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
            self._backends[key] = requested, _lease(self._leases[-1], 1, requested)[0]
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
        return [(address, port) for port in _lease(self._extra, count, requested)] if count else []


def _lease(ports: Ports, count: int, requested: int | None) -> tuple[int, ...]:
    return ports.take(count) if requested is None else ports.take_after(requested, count)


PORT_LEASES = PortLeases()
"""Port leases of this process."""
