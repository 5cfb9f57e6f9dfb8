"""Network interfaces: the address by which the other processes of a run reach this host."""

from __future__ import annotations

import socket
from collections.abc import Mapping

import psutil

from isotrain.core.errors import PlanError

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
