"""horovodrun: Horovod's own launcher, by Gloo or by MPI."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

from isotrain.launchers.host_options import HostOptions, as_text, rendezvous_variables
from isotrain.plugin import Allocation, Availability, RankCommand, SchedulerLauncher, Submission


class HorovodrunLauncher(SchedulerLauncher):
    """Has horovodrun start the ranks, over SSH on other hosts.

    It writes all variables of this process on the command lines of `ssh`, and of the shells that start ranks
    here, where everybody can read them. So it is told the file that has the key: the user's own where there
    is one, which each host has then, else one beside the run's other files.
    """

    name = "horovodrun"
    summary = "Horovod's launcher, on this machine or on hosts that SSH reaches"

    def __init__(
        self,
        hosts: str | None = None,
        processes: int | None = None,
        gpus_per_host: int | None = None,
        controller: Literal["gloo", "mpi"] = "gloo",
    ) -> None:
        """Takes where to start.

        Args:
            hosts: `node1:2,node2:2`: where, and how many processes; left out: on the hosts of the job of
                SLURM, PBS or LSF that this process is in, else on this machine.
            processes: On this machine, where no hosts are given.
            gpus_per_host: Where they cannot be looked at from here.
            controller: What starts and connects the ranks: `gloo`, or `mpi`, which is mpirun.
        """
        self._where = HostOptions(self.name, hosts, processes, gpus_per_host)
        self._controller = controller

    def availability(self) -> Availability:
        if find_spec("horovod") is None:
            hint = "build it for the installed frameworks: python tools/horovod/build.py"
            return Availability(False, None, "horovod is not installed", hint)
        return Availability(True)

    def allocation(self) -> Allocation:
        return self._where.allocation(os.environ)

    def without(self, host: str) -> Mapping[str, Any]:
        return self._where.without(host)

    def submission(self, command: RankCommand) -> Submission:
        allocation = self.allocation()
        size = ["-np", str(allocation.slots)]
        if allocation.hosts:
            size += ["-H", as_text(allocation)]
        run = (sys.executable, "-m", "horovod.runner.launch", f"--{self._controller}", *size)
        told, files = rendezvous_variables(allocation, command), {}
        if not _has_own_key(command):
            files = {"key": command.key}
            told |= {command.key_file_variable: str(command.spec.with_name("key"))}
        run = (*run, *command.arguments)
        return Submission((run,), told, files, key_in_environment=False)


def _has_own_key(command: RankCommand) -> bool:
    """Whether hosts are taken to have a key, as this one has."""
    is_named = command.key_file_variable in command.variables
    return is_named or Path(os.path.expanduser(command.key_file)).exists()
