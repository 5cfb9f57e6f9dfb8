"""The ports of this process in the runs that it joins, kept for it: the backend's until it ends."""

from __future__ import annotations

from collections.abc import Callable

from isotrain.core.contracts.process import Address
from isotrain.core.errors import PlanError
from isotrain.core.launching.ports import Ports


class OwnPorts:
    """Leases on ports of this machine. A lease ends with its object: a framework's server keeps its port."""

    def __init__(self, ports: Callable[[str], Ports] = Ports) -> None:
        """Takes how ports of an address are had."""
        self._ports = ports
        self._leases: dict[str, Ports] = {}
        self._doors: Ports | None = None
        self._backends: dict[str, tuple[int | None, int]] = {}
        """By address: what was asked for, and the port."""

    def backend(self, address: str, asked: int | None) -> int:
        """The port of the backend's own server, the same for all runs of this process.

        Args:
            address: That others reach it by; empty: all of this machine's.
            asked: Take the first free one after this; None: any.

        Raises:
            PlanError: An earlier run was told another one.
        """
        if address not in self._backends:
            ports = self._leases[address] = self._ports(address)
            self._backends[address] = asked, _taken(ports, 1, asked)[0]
        before, port = self._backends[address]
        if asked not in (None, before):
            raise PlanError(
                f"port: this process keeps {port} for the backend, since a run before this one; received"
                f" {asked}. Give all its runs the same --port (port= in Python), or none."
            )
        return port

    def doors(self, address: str, count: int, asked: int | None) -> list[Address]:
        """Where rank 0 lets others in besides, in one run; those of the run before it are given back."""
        if self._doors is not None:
            self._doors.close()
        self._doors = self._ports(address)
        return [(address, port) for port in _taken(self._doors, count, asked)] if count else []


def _taken(ports: Ports, count: int, asked: int | None) -> tuple[int, ...]:
    return ports.take(count) if asked is None else ports.take_after(asked, count)


OWN_PORTS = OwnPorts()
"""Of this process."""
