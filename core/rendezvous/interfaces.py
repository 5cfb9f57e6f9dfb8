"""Network interfaces of this host, and the address of the rendezvous."""

from __future__ import annotations

import socket
from collections.abc import Mapping
from dataclasses import dataclass

import psutil

from isotrain.core.contracts.cluster_environment import ClusterInfo
from isotrain.core.contracts.process import LOCALHOST
from isotrain.core.errors import PlanError
from isotrain.core.planning.cluster_environment import COORDINATOR_VARIABLE, explain_rank

_ALL_ADDRESSES = ""

INTERFACE_VARIABLE = "ISOTRAIN_INTERFACE"
"""Environment variable: network interface, by name or address, for a backend's communication; also for the
rendezvous of processes on one host."""


def requested_interface(interface: str | None, variables: Mapping[str, str]) -> str:
    """The interface that the option, else the environment variable, names; empty: none."""
    return (variables.get(INTERFACE_VARIABLE, "") if interface is None else interface).strip()


def interface_address(requested: str) -> str | None:
    """IPv4 address of the interface with this name or address; None if none was requested.

    Raises:
        PlanError: This host has no such interface.
    """
    if not requested:
        return None
    addresses = {
        name: [each.address for each in entries if each.family == socket.AF_INET]
        for name, entries in psutil.net_if_addrs().items()
    }
    if addresses.get(requested):
        return addresses[requested][0]
    if is_local_address(requested):
        return requested
    available = "; ".join(f"{name}: {', '.join(each)}" for name, each in addresses.items() if each)
    raise PlanError(
        f"interface (or {INTERFACE_VARIABLE}): expected the name or address of one of {socket.gethostname()},"
        f" received {requested!r}. It has {available}."
    )


def is_local_address(address: str) -> bool:
    """Whether this host can listen on an address."""
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
            probe.bind((address, 0))
    except OSError:
        return False
    return True


def is_loopback(address: str) -> bool:
    """Whether an IPv4 address is a loopback address."""
    return address.startswith("127.")


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
