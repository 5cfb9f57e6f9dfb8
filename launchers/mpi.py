"""MPI: `mpirun` of Open MPI, or of MPICH and its derivatives (Hydra)."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Mapping
from typing import Any, Literal, get_args

from isotrain.launchers.host_options import HostOptions, as_text, local_host, rendezvous_variables
from isotrain.plugin import (
    Allocation,
    Availability,
    PlanError,
    RankCommand,
    SchedulerLauncher,
    Submission,
)

_KILL_TIMEOUT = {"OMPI_MCA_odls_base_sigkill_timeout": "4"}
"""Seconds between SIGTERM and SIGKILL when Open MPI ends the other ranks; its default of 1 s is too short for
an error report."""

MpiFlavor = Literal["open-mpi", "hydra"]


class MpiLauncher(SchedulerLauncher):
    """Starts the ranks by `mpirun`, over SSH on other hosts."""

    name = "mpi"
    summary = "mpirun of Open MPI or MPICH, on this machine or on hosts that SSH reaches"

    def __init__(
        self,
        hosts: str | None = None,
        processes: int | None = None,
        gpus_per_host: int | None = None,
        mpirun: str = "mpirun",
        flavor: MpiFlavor | None = None,
    ) -> None:
        """Keeps the options.

        Args:
            hosts: Hosts with their numbers of processes, `node1:2,node2:2`; left out: the hosts of the job
                of SLURM, PBS or LSF that this process is in, else this machine.
            processes: Number of processes on this machine, without `hosts`; left out: as many as the
                requested replicas take.
            gpus_per_host: GPUs of each host, if they differ from this machine's.
            mpirun: Name or path of `mpirun`.
            flavor: `open-mpi`, or `hydra` for MPICH and Intel MPI; left out: by the output of
                `mpirun --version`, and Open MPI if there is no `mpirun` here.
        """
        if flavor not in (None, *get_args(MpiFlavor)):
            expected = ", ".join(get_args(MpiFlavor))
            raise PlanError(f"mpi: flavor: expected one of {expected}, received {flavor!r}.")
        self._host_options = HostOptions(self.name, hosts, processes, gpus_per_host)
        self._mpirun = mpirun
        self._flavor = flavor

    def availability(self) -> Availability:
        if shutil.which(self._mpirun) is None:
            hint = "install Open MPI or MPICH (Debian: sudo apt install openmpi-bin)"
            assumed = "" if self._flavor else "; Open MPI is assumed"
            return Availability(False, None, f"there is no {self._mpirun}{assumed}", hint)
        return Availability(True)

    def allocation(self) -> Allocation:
        return self._host_options.allocation(os.environ)

    def options_for(self, processes: int) -> Mapping[str, Any]:
        return self._host_options.options_for(processes)

    def without(self, host: str) -> Mapping[str, Any]:
        return self._host_options.without(host)

    def submission(self, command: RankCommand) -> Submission:
        allocation = self.allocation()
        hosts = as_text(allocation) if allocation.hosts else ""
        variables = rendezvous_variables(allocation, command)
        if (self._flavor or flavor(self._mpirun)) == "open-mpi":
            variables |= rendezvous_variables(allocation, command, first=local_host(allocation))
            names = (*command.variables, *variables, *command.secret_variables)
            options = _open_mpi_options(hosts, names)
        else:
            options = _hydra_options(hosts, by_ssh=self._host_options.hosts is not None)
        count = ("-np", str(allocation.slots))
        run = (self._mpirun, *options, *count, *command.arguments)
        return Submission((run,), {**variables, **_KILL_TIMEOUT})


def _open_mpi_options(hosts: str, variables: tuple[str, ...]) -> list[str]:
    # By default, Open MPI binds each rank of a small run to one core, with all of its threads.
    options = ["--bind-to", "none"]
    if hosts:
        options += ["--host", hosts]
    if os.geteuid() == 0:
        options += ["--allow-run-as-root"]
    for name in variables:
        options += ["-x", name]
    return options


def _hydra_options(hosts: str, *, by_ssh: bool) -> list[str]:
    # Hydra passes all variables on by default; with a list of them, MPICH 4.0 loses one on other hosts.
    # In a job of a batch system, Hydra knows how to start processes on other hosts.
    if not hosts:
        return []
    return [*(("-launcher", "ssh") if by_ssh else ()), "-hosts", hosts]


def flavor(mpirun: str) -> MpiFlavor:
    """MPI implementation of an `mpirun`, by its `--version`; Open MPI if there is no such program here.

    Raises:
        PlanError: The implementation is not supported.
    """
    if shutil.which(mpirun) is None:
        return "open-mpi"
    version = subprocess.run(
        [mpirun, "--version"], capture_output=True, text=True, check=False
    ).stdout
    if "Open MPI" in version or "OpenRTE" in version or "PRTE" in version:
        return "open-mpi"
    if "HYDRA" in version or "Intel(R) MPI" in version:
        return "hydra"
    raise PlanError(
        f"mpi: {mpirun} is of an MPI that isotrain does not know: {version.strip()[:200]!r}. Supported are"
        f" Open MPI, MPICH and Intel MPI. Start the ranks by hand: {mpirun} ... isotrain run SPEC --backend"
        " NAME."
    )
