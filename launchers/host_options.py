"""The options of launchers that are told where to go: `hosts`, or `processes`, and `gpus_per_host`."""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from isotrain.launchers.batch_job import allocated
from isotrain.plugin import Allocation, HostSlots, PlanError, RankCommand, visible_gpus

_HOST = re.compile(r"(?P<host>[\w.-]+)(?::(?P<slots>[1-9]\d*))?")


@dataclass(frozen=True)
class HostOptions:
    """Where to start, as it was asked for.

    Attributes:
        launcher: Its name, for messages.
        hosts: `HOST:SLOTS` between commas; a host without slots gives one. None: those of the job of SLURM,
            PBS or LSF that this process is in, else this machine.
        processes: On this machine; None where hosts are given, or those of the job are meant.
        gpus: Of each host; None: as this machine has, or the job says, if it does.
    """

    launcher: str
    hosts: str | None = None
    processes: int | None = None
    gpus: int | None = None

    def __post_init__(self) -> None:
        """Refuses what contradicts itself.

        Raises:
            PlanError: Processes of this machine are asked for as well as hosts, or none.
        """
        if self.processes is not None and self.hosts is not None:
            raise PlanError(
                f"{self.launcher}: processes: it is of this machine, and hosts say how many each of them"
                f" runs: {self.hosts!r}. Leave one of the two out."
            )
        if self.processes is not None and self.processes < 1:
            raise PlanError(
                f"{self.launcher}: processes: expected at least 1, received {self.processes}."
            )

    def allocation(self, variables: Mapping[str, str]) -> Allocation:
        """What they ask for.

        Args:
            variables: Of this process.

        Raises:
            PlanError: They say something else, or the job's hosts cannot be told.
        """
        if self.hosts is not None:
            shares = tuple(self._share(part.strip()) for part in self.hosts.split(","))
        else:
            job = allocated(variables) if self.processes is None else None
            here = HostSlots(self.processes or 1, devices=visible_gpus(variables))
            shares = (here,) if job is None else job.host_slots
        if self.gpus is None:
            return Allocation(shares)
        return Allocation(tuple(replace(share, devices=self.gpus) for share in shares))

    def without(self, host: str) -> dict[str, Any]:
        """The options that change for a start without one of the hosts.

        Args:
            host: The one to leave out, as it calls itself: a domain does not matter.

        Raises:
            PlanError: It is none of them, or the only one.
        """
        shares = self.allocation(os.environ).host_slots
        left = tuple(share for share in shares if _short(share.host or "") != _short(host))
        if len(left) in (0, len(shares)):
            raise PlanError(
                f"{self.launcher}: hosts: {host} cannot be left out of {as_text(Allocation(shares))}."
            )
        devices = {share.devices for share in left}
        known = {} if len(devices) > 1 or None in devices else {"gpus_per_host": devices.pop()}
        return {"hosts": as_text(Allocation(left)), **known}

    def _share(self, text: str) -> HostSlots:
        match = _HOST.fullmatch(text)
        if match is None:
            raise PlanError(
                f"{self.launcher}: hosts: expected HOST or HOST:SLOTS between commas, such as"
                f" node1:2,node2:2, received {text!r}."
            )
        return HostSlots(int(match["slots"] or 1), match["host"])


def as_text(allocation: Allocation) -> str:
    """The hosts as an option, which mpirun and horovodrun write alike."""
    return ",".join(
        f"{share.host or 'this machine'}:{share.slots}" for share in allocation.host_slots
    )


def rendezvous_variables(
    allocation: Allocation, command: RankCommand, first: str | None = None
) -> dict[str, str]:
    """Says where ranks meet, for engines that do not tell, or tell where they were started themselves.

    Args:
        allocation: Has the hosts.
        command: Of a rank.
        first: The host of rank 0; None: the first one.
    """
    if not allocation.hosts:
        return {}
    return {"ISOTRAIN_COORDINATOR": first or allocation.hosts[0], "ISOTRAIN_JOB": command.name}


def local_host(allocation: Allocation) -> str | None:
    """Which of the hosts this process is on, by the name that it has there; Open MPI begins with it."""
    own = _short(socket.gethostname())
    return next((host for host in allocation.hosts if _short(host) == own), None)


def _short(host: str) -> str:
    return host.partition(".")[0]
