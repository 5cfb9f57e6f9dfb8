"""Options of launchers that take a list of hosts: `hosts` or `processes`, and `gpus_per_host`."""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from isotrain.launchers.batch_job import batch_allocation
from isotrain.plugin import Allocation, HostSlots, PlanError, RankCommand, visible_gpus

_HOST = re.compile(r"(?P<host>[\w.-]+)(?::(?P<slots>[1-9]\d*))?")


@dataclass(frozen=True)
class HostOptions:
    """Requested hosts and processes.

    Attributes:
        launcher: Name of the launcher, for messages.
        hosts: `HOST:SLOTS` separated by commas; a host without slots has one. None: the hosts of the job of
            SLURM, PBS or LSF that this process is in, else this machine.
        processes: Number of processes on this machine; None: as `hosts` or the job say.
        gpus: GPUs of each host; None: as this machine has, or as the job says.
    """

    launcher: str
    hosts: str | None = None
    processes: int | None = None
    gpus: int | None = None

    def __post_init__(self) -> None:
        """Validates the options.

        Raises:
            PlanError: Both `processes` and `hosts` are set, or `processes` is below 1.
        """
        if self.processes is not None and self.hosts is not None:
            raise PlanError(
                f"{self.launcher}: processes: it is for this machine, and hosts has numbers for each host:"
                f" {self.hosts!r}. Leave one of the two out."
            )
        if self.processes is not None and self.processes < 1:
            raise PlanError(
                f"{self.launcher}: processes: expected at least 1, received {self.processes}."
            )

    def allocation(self, variables: Mapping[str, str]) -> Allocation:
        """The requested allocation.

        Args:
            variables: Environment variables of this process.

        Raises:
            PlanError: `hosts` is invalid, or the job's hosts are unknown.
        """
        if self.hosts is not None:
            host_slots = tuple(self._parse_host(part.strip()) for part in self.hosts.split(","))
        else:
            job = batch_allocation(variables) if self.processes is None else None
            local = HostSlots(self.processes or 1, devices=visible_gpus(variables))
            host_slots = (local,) if job is None else job.host_slots
        if self.gpus is None:
            return Allocation(host_slots)
        return Allocation(tuple(replace(each, devices=self.gpus) for each in host_slots))

    def options_for(self, processes: int) -> dict[str, Any]:
        """The option `processes`, where neither the options nor a job say how many there are."""
        if self.hosts or self.processes or batch_allocation(os.environ) is not None:
            return {}
        return {"processes": processes}

    def without(self, host: str) -> dict[str, Any]:
        """Changed options for a restart that excludes a host.

        Args:
            host: Name of the host, as it calls itself, with or without its domain.

        Raises:
            PlanError: It is not one of the hosts, or the only one.
        """
        host_slots = self.allocation(os.environ).host_slots
        remaining = tuple(each for each in host_slots if _short(each.host or "") != _short(host))
        if len(remaining) in (0, len(host_slots)):
            raise PlanError(
                f"{self.launcher}: hosts: {host} cannot be left out of {as_text(Allocation(host_slots))}."
            )
        devices = {each.devices for each in remaining}
        is_known = len(devices) == 1 and None not in devices
        gpus = {"gpus_per_host": devices.pop()} if is_known else {}
        return {"hosts": as_text(Allocation(remaining)), **gpus}

    def _parse_host(self, text: str) -> HostSlots:
        match = _HOST.fullmatch(text)
        if match is None:
            raise PlanError(
                f"{self.launcher}: hosts: expected HOST or HOST:SLOTS between commas, such as"
                f" node1:2,node2:2, received {text!r}."
            )
        return HostSlots(int(match["slots"] or 1), match["host"])


def as_text(allocation: Allocation) -> str:
    """The hosts as `HOST:SLOTS,...`, the host list format of mpirun and horovodrun."""
    return ",".join(f"{each.host or 'this machine'}:{each.slots}" for each in allocation.host_slots)


def rendezvous_variables(
    allocation: Allocation, command: RankCommand, first: str | None = None
) -> dict[str, str]:
    """Environment variables with the rendezvous host, for launchers that do not set the host of rank 0.

    Args:
        allocation: Allocation with the hosts.
        command: Command of a rank.
        first: Host of rank 0; None: the first one.
    """
    if not allocation.hosts:
        return {}
    return {"ISOTRAIN_COORDINATOR": first or allocation.hosts[0], "ISOTRAIN_JOB": command.name}


def local_host(allocation: Allocation) -> str | None:
    """The allocation's name for this host, on which Open MPI starts rank 0; None: not among the hosts."""
    hostname = _short(socket.gethostname())
    return next((host for host in allocation.hosts if _short(host) == hostname), None)


def _short(host: str) -> str:
    return host.partition(".")[0]
