"""Where rank 0's door is: where the others call, and where it listens, which is one decision."""

from __future__ import annotations

import socket
from dataclasses import dataclass

from isotrain.core.contracts.cluster_environment import ClusterInfo
from isotrain.core.contracts.process import LOCALHOST
from isotrain.core.errors import PlanError
from isotrain.core.planning.cluster_environment import COORDINATOR_VARIABLE, claim
from isotrain.core.rendezvous.interfaces import interface_address, is_local_address, is_loopback

_ANY = ""
"""All addresses of a machine."""


@dataclass(frozen=True)
class RendezvousAddress:
    """Where the processes of a joined run come together.

    Attributes:
        host: Name or address of rank 0's host, as the others call it.
        listen_address: The address that rank 0 listens on; empty: all of its machine's, since it cannot know
            which one the name stands for elsewhere.
    """

    host: str
    listen_address: str

    @classmethod
    def of(cls, place: ClusterInfo, interface: str) -> RendezvousAddress:
        """The same for all processes of a run, but for what only rank 0 needs.

        Args:
            place: Of this process.
            interface: That was asked for, if one was.

        Raises:
            PlanError: Nobody says where rank 0 is, or there is no such interface.
        """
        if place.is_on_one_host:
            here = interface_address(interface) or LOCALHOST
            return cls(here, here)
        called = place.coordinator or next(iter(place.hosts), None)
        if called is None:
            raise PlanError(
                f"{place.environment} does not tell its processes where rank 0 is. Set"
                f" {COORDINATOR_VARIABLE} to"
                f" the name or address of its host for all of them. {claim(place)}"
            )
        return cls(called, _heard_at(called) if place.rank == 0 else _ANY)


def _heard_at(called: str) -> str:
    """Where rank 0 hears those who call it so.

    Its own name may stand for the loopback address here, as Debian has it, and for another one elsewhere.
    """
    try:
        found = socket.gethostbyname(called)
    except OSError:
        return _ANY
    means_the_same_everywhere = not is_loopback(found) or called in ("localhost", found)
    return found if means_the_same_everywhere and is_local_address(found) else _ANY
