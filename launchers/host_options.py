"""The option `hosts` of launchers that are told where to go: `node1:2,node2:2`."""

from __future__ import annotations

import re

from isotrain.plugin import Allocation, PlanError, RankCommand, Share

_HOST = re.compile(r"(?P<host>[\w.-]+)(?::(?P<slots>[1-9]\d*))?")


def allocation_of(launcher: str, hosts: str | None, processes: int) -> Allocation:
    """What the options ask for.

    Args:
        launcher: Its name, for messages.
        hosts: `HOST:SLOTS` between commas; a host without slots gives one. None: this machine.
        processes: On this machine, where no hosts are given.

    Raises:
        PlanError: They say something else.
    """
    if hosts is None:
        return Allocation((Share(_at_least_one(launcher, processes)),))
    return Allocation(tuple(_share(launcher, part.strip()) for part in hosts.split(",")))


def without(launcher: str, hosts: str | None, host: str) -> dict[str, str]:
    """The option for a start without one of the hosts.

    Args:
        launcher: Its name, for messages.
        hosts: The option as it was.
        host: The one to leave out, as it calls itself: a domain does not matter.

    Raises:
        PlanError: It is none of them, or the only one.
    """
    shares = allocation_of(launcher, hosts, 1).shares
    left = tuple(share for share in shares if _short(share.host or "") != _short(host))
    if len(left) in (0, len(shares)):
        raise PlanError(f"{launcher}: hosts: {host} cannot be left out of {hosts!r}.")
    return {"hosts": as_text(Allocation(left))}


def _short(host: str) -> str:
    return host.partition(".")[0]


def as_text(allocation: Allocation) -> str:
    """The same as an option, which mpirun and horovodrun write alike."""
    return ",".join(f"{share.host}:{share.slots}" for share in allocation.shares)


def meeting(allocation: Allocation, command: RankCommand) -> dict[str, str]:
    """Says where ranks meet, for engines that do not tell, or tell where they were started themselves."""
    if not allocation.hosts:
        return {}
    return {"ISOTRAIN_COORDINATOR": allocation.hosts[0], "ISOTRAIN_JOB": command.name}


def _at_least_one(launcher: str, processes: int) -> int:
    if processes < 1:
        raise PlanError(f"{launcher}: processes: expected at least 1, received {processes}.")
    return processes


def _share(launcher: str, text: str) -> Share:
    match = _HOST.fullmatch(text)
    if match is None:
        raise PlanError(
            f"{launcher}: hosts: expected HOST or HOST:SLOTS between commas, such as node1:2,node2:2,"
            f" received {text!r}."
        )
    return Share(int(match["slots"] or 1), match["host"])
