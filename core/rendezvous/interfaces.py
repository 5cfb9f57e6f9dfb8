"""Which address of this machine the other processes of a run reach it by."""

from __future__ import annotations

import socket
from collections.abc import Mapping

import psutil

from isotrain.core.errors import PlanError

INTERFACE_VARIABLE = "ISOTRAIN_INTERFACE"
"""The network interface, by its name or address, over which a backend's processes talk; also where all
processes meet that are on one host."""


def requested_interface(interface: str | None, variables: Mapping[str, str]) -> str:
    """What was asked for: as an option, else by the variable; empty where nothing was."""
    return (variables.get(INTERFACE_VARIABLE, "") if interface is None else interface).strip()


def interface_address(asked: str) -> str | None:
    """The address of the interface that was asked for; None where none was.

    Args:
        asked: What `requested_interface` found.

    Raises:
        PlanError: This machine has no such interface.
    """
    if not asked:
        return None
    found = {
        name: [each.address for each in addresses if each.family == socket.AF_INET]
        for name, addresses in psutil.net_if_addrs().items()
    }
    if found.get(asked):
        return found[asked][0]
    if is_local_address(asked):
        return asked
    known = "; ".join(f"{name}: {', '.join(each)}" for name, each in found.items() if each)
    raise PlanError(
        f"interface (or {INTERFACE_VARIABLE}): expected the name or address of one of {socket.gethostname()},"
        f" received {asked!r}. It has {known}."
    )


def is_local_address(address: str) -> bool:
    """Whether this machine has an address: one can listen on it."""
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
            probe.bind((address, 0))
    except OSError:
        return False
    return True


def is_loopback(address: str) -> bool:
    """Whether only this machine reaches it."""
    return address.startswith("127.")
