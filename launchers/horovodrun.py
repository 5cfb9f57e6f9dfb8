"""horovodrun: Horovod's own launcher, with Gloo or MPI."""

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
    """Starts the ranks by horovodrun, over SSH on other hosts.

    horovodrun writes all environment variables on the command lines of `ssh` and of local shells, where
    other users can read them. So the ranks read the key from a file: the user's key file if there is one,
    which each host must then have, else a file in the run directory.
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
        """Keeps the options.

        Args:
            hosts: Hosts with their numbers of processes, `node1:2,node2:2`; left out: the hosts of the job
                of SLURM, PBS or LSF that this process is in, else this machine.
            processes: Number of processes on this machine, without `hosts`; left out: as many as the
                requested replicas take.
            gpus_per_host: GPUs of each host, if they differ from this machine's.
            controller: Horovod controller: `gloo`, or `mpi`, which uses mpirun.
        """
        self._host_options = HostOptions(self.name, hosts, processes, gpus_per_host)
        self._controller = controller

    def availability(self) -> Availability:
        if find_spec("horovod") is None:
            hint = "build it for the installed frameworks: python -m isotrain.build_horovod"
            return Availability(False, None, "horovod is not installed", hint)
        return Availability(True)

    def allocation(self) -> Allocation:
        return self._host_options.allocation(os.environ)

    def options_for(self, processes: int) -> Mapping[str, Any]:
        return self._host_options.options_for(processes)

    def without(self, host: str) -> Mapping[str, Any]:
        return self._host_options.without(host)

    def submission(self, command: RankCommand) -> Submission:
        allocation = self.allocation()
        size = ["-np", str(allocation.slots)]
        if allocation.hosts:
            size += ["-H", as_text(allocation)]
        run = (sys.executable, "-m", "horovod.runner.launch", f"--{self._controller}", *size)
        variables, files = rendezvous_variables(allocation, command), {}
        if not _has_key_file(command):
            files = {"key": command.key}
            variables |= {command.key_file_variable: str(command.spec.with_name("key"))}
        run = (*run, *command.arguments)
        return Submission((run,), variables, files, key_in_environment=False)


def _has_key_file(command: RankCommand) -> bool:
    """Whether this host has a key file; the other hosts are assumed to have it too."""
    is_named = command.key_file_variable in command.variables
    return is_named or Path(os.path.expanduser(command.key_file)).exists()
