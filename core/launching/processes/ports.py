"""Ports of this machine for the processes of one run."""

from __future__ import annotations

import secrets
import socket
from collections.abc import Sequence

from isotrain.core.contracts.process import LOCALHOST, Address
from isotrain.core.errors import PlanError

PORTS = range(15000, 32000)
"""Below the range from which systems take ports of outgoing connections."""
_HIGHEST = 65535
_NEAR = 1000
"""So far from a port are those that are looked at after it."""


class Ports:
    """Ports of one address for one run, leased so that no other run here takes them.

    A lease is a lock on a socket name of the kernel's abstract namespace: it ends with this process.
    """

    def __init__(self, address: str = LOCALHOST) -> None:
        self._address = address
        self._leases: list[socket.socket] = []

    def take(self, count: int, first: int | None = None) -> tuple[int, ...]:
        """Leases `count` ports.

        Args:
            count: How many.
            first: Take this one and those after it, instead of any that are free.

        Returns:
            Their numbers.

        Raises:
            PlanError: A port that was asked for is in use, or none are left.
        """
        if first is not None:
            require_port(first, _HIGHEST + 1 - count)
            return tuple(self._exactly(port) for port in range(first, first + count))
        start = secrets.randbelow(len(PORTS))
        return self._first_free(count, (*PORTS[start:], *PORTS[:start]))

    def take_after(self, port: int, count: int) -> tuple[int, ...]:
        """Leases the first `count` free ports after a port.

        Raises:
            PlanError: Not so many of the next are free.
        """
        return self._first_free(count, range(port + 1, min(port + _NEAR, _HIGHEST) + 1))

    def take_one_of(self, ports: Sequence[int]) -> int | None:
        """Leases the first of some ports that is free; None: none of them is."""
        return next((port for port in ports if self._lease(port) is None), None)

    def _first_free(self, count: int, candidates: Sequence[int]) -> tuple[int, ...]:
        taken = (port for port in candidates if self._lease(port) is None)
        found = tuple(port for _, port in zip(range(count), taken, strict=False))
        if len(found) < count:
            between = f"between {min(candidates)} and {max(candidates)}" if candidates else "there"
            raise PlanError(f"no {count} free ports {between}.")
        return found

    def _exactly(self, port: int) -> int:
        problem = self._lease(port)
        if problem is not None:
            raise PlanError(
                f"port {port} of {self._address} cannot be used: {problem}. Choose another with --port"
                " (port= in Python), or leave it out and a free one is found."
            )
        return port

    def _lease(self, port: int) -> str | None:
        """Takes a port; returns why it cannot be had, or None."""
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
        self._leases.append(lease)
        return None

    def close(self) -> None:
        """Gives the leases back."""
        for lease in self._leases:
            lease.close()
        self._leases.clear()


def require_port(port: int, highest: int = _HIGHEST) -> None:
    """Refuses what is no number of a port.

    Raises:
        PlanError: It is none, or above the highest that will do.
    """
    if not 0 < port <= highest:
        raise PlanError(f"port: expected 1 to {highest}, received {port}.")


def _listen_once(address: Address) -> None:
    """Raises OSError where nobody could listen; connections that are only fading away do not count."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind(address)
        probe.listen()
