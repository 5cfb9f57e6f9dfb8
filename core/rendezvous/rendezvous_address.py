"""Address of the rendezvous: where rank 0 listens, and where the other ranks connect."""

from __future__ import annotations

import socket
from dataclasses import dataclass

from isotrain.core.contracts.cluster_environment import ClusterInfo
from isotrain.core.contracts.process import LOCALHOST
from isotrain.core.errors import PlanError
from isotrain.core.planning.cluster_environment import COORDINATOR_VARIABLE, explain_rank
from isotrain.core.rendezvous.interfaces import interface_address, is_local_address, is_loopback

_ALL_ADDRESSES = ""


@dataclass(frozen=True)
class RendezvousAddress:
    """Address of rank 0's server.

    Attributes:
        host: Name or address of rank 0's host, as the other ranks use it.
        listen_address: Address that rank 0 listens on; empty: all addresses of its host, as it cannot know
            to which one the name resolves elsewhere.
    """

    host: str
    listen_address: str

    @classmethod
    def of(cls, cluster_info: ClusterInfo, interface: str) -> RendezvousAddress:
        """The rendezvous address of a run: `host` is the same on all ranks.

        Args:
            cluster_info: Cluster info of this process.
            interface: Requested network interface; empty: none.

        Raises:
            PlanError: The host of rank 0 is unknown, or there is no such interface.
        """
        if cluster_info.is_on_one_host:
            address = interface_address(interface) or LOCALHOST
            return cls(address, address)
        host = cluster_info.coordinator or next(iter(cluster_info.hosts), None)
        if host is None:
            raise PlanError(
                f"{cluster_info.environment} does not tell its processes where rank 0 is. Set"
                f" {COORDINATOR_VARIABLE} to"
                f" the name or address of its host for all of them. {explain_rank(cluster_info)}"
            )
        return cls(host, _listen_address(host) if cluster_info.rank == 0 else _ALL_ADDRESSES)


def _listen_address(host: str) -> str:
    """Address on which rank 0 receives connections to its host name.

    On the host itself (Debian's /etc/hosts) the name may resolve to loopback, elsewhere to another address.
    """
    try:
        address = socket.gethostbyname(host)
    except OSError:
        return _ALL_ADDRESSES
    is_same_everywhere = not is_loopback(address) or host in ("localhost", address)
    return address if is_same_everywhere and is_local_address(address) else _ALL_ADDRESSES
