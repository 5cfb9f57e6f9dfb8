"""The ports of this process in the runs that it joins, kept for it: those of backends until it ends."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from isotrain.core.contracts.process import Address
from isotrain.core.errors import PlanError
from isotrain.core.launching.processes.ports import Ports


class PortLeases:
    """Leases on ports of this machine. A lease ends with its object: a framework's server keeps its port."""

    def __init__(self, ports: Callable[[str], Ports] = Ports) -> None:
        """Takes how ports of an address are had."""
        self._ports = ports
        self._leases: list[Ports] = []
        self._doors: Ports | None = None
        self._meeting: Ports | None = None
        self._backends: dict[tuple[str, str], tuple[int | None, int]] = {}
        """By backend and address: what was asked for, and the port."""

    def backend(self, name: str, address: str, asked: int | None) -> int:
        """The port of a backend's own server, the same for all its runs in this process.

        Args:
            name: Of the backend; another one has another port, for a server may be there until the end.
            address: That others reach it by; empty: all of this machine's.
            asked: Take the first free one after this; None: any.

        Raises:
            PlanError: An earlier run was told another one.
        """
        key = (name, address)
        if key not in self._backends:
            self._leases.append(self._ports(address))
            self._backends[key] = asked, _taken(self._leases[-1], 1, asked)[0]
        before, port = self._backends[key]
        if asked not in (None, before):
            raise PlanError(
                f"port: this process keeps {port} for {name}, since a run before this one; received"
                f" {asked}. Give all its runs the same --port (port= in Python), or none."
            )
        return port

    def rendezvous(self, address: str, candidates: Sequence[int]) -> list[int]:
        """Where rank 0 tries to let the others in: first where no other run here is or will be.

        The port of the run before it is given back.

        Args:
            address: To listen on; empty: all of this machine's.
            candidates: In the order in which the others call there.
        """
        if self._meeting is not None:
            self._meeting.close()
        self._meeting = self._ports(address)
        kept = self._meeting.take_one_of(candidates)
        first = [] if kept is None else [kept]
        return [*first, *(port for port in candidates if port != kept)]

    def extra_ports(self, address: str, count: int, asked: int | None) -> list[Address]:
        """Where rank 0 lets others in besides, in one run; those of the run before it are given back."""
        if self._doors is not None:
            self._doors.close()
        self._doors = self._ports(address)
        return [(address, port) for port in _taken(self._doors, count, asked)] if count else []


def _taken(ports: Ports, count: int, asked: int | None) -> tuple[int, ...]:
    return ports.take(count) if asked is None else ports.take_after(asked, count)


PORT_LEASES = PortLeases()
"""Of this process."""
