"""MPI: `mpirun` of Open MPI, or of MPICH and what is made from it (Hydra), starts the ranks."""

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

_LAST_WORDS = {"OMPI_MCA_odls_base_sigkill_timeout": "4"}
"""Seconds: Open MPI ends the other ranks when a host is lost, and gives them 1 to say what has happened."""

MpiFlavor = Literal["open-mpi", "hydra"]


class MpiLauncher(SchedulerLauncher):
    """Has `mpirun` start the ranks, over SSH on other hosts."""

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
        """Takes where to start.

        Args:
            hosts: `node1:2,node2:2`: where, and how many processes; left out: on the hosts of the job of
                SLURM, PBS or LSF that this process is in, else on this machine.
            processes: On this machine, where no hosts are given.
            gpus_per_host: Where they cannot be looked at from here.
            mpirun: The program, by name or path.
            flavor: `open-mpi`, or `hydra`, which is MPICH's and Intel MPI's; left out: as `mpirun` says
                itself, and Open MPI where there is none to ask.
        """
        if flavor not in (None, *get_args(MpiFlavor)):
            known = ", ".join(get_args(MpiFlavor))
            raise PlanError(f"mpi: flavor: expected one of {known}, received {flavor!r}.")
        self._where = HostOptions(self.name, hosts, processes, gpus_per_host)
        self._mpirun = mpirun
        self._flavor = flavor

    def availability(self) -> Availability:
        if shutil.which(self._mpirun) is None:
            hint = "install Open MPI or MPICH (Debian: sudo apt install openmpi-bin)"
            taken = "" if self._flavor else ", and it is taken for Open MPI's"
            return Availability(False, None, f"there is no {self._mpirun}{taken}", hint)
        return Availability(True)

    def allocation(self) -> Allocation:
        return self._where.allocation(os.environ)

    def without(self, host: str) -> Mapping[str, Any]:
        return self._where.without(host)

    def submission(self, command: RankCommand) -> Submission:
        allocation = self.allocation()
        where = as_text(allocation) if allocation.hosts else ""
        told = rendezvous_variables(allocation, command)
        if (self._flavor or flavor(self._mpirun)) == "open-mpi":
            told |= rendezvous_variables(allocation, command, first=local_host(allocation))
            options = _open_mpi(where, (*command.variables, *told, *command.secret_variables))
        else:
            options = _hydra(where, by_ssh=self._where.hosts is not None)
        count = ("-np", str(allocation.slots))
        run = (self._mpirun, *options, *count, *command.arguments)
        return Submission((run,), {**told, **_LAST_WORDS})


def _open_mpi(where: str, told: tuple[str, ...]) -> list[str]:
    # Open MPI would bind each of a few ranks to one core, and all threads of a rank with it.
    options = ["--bind-to", "none"]
    if where:
        options += ["--host", where]
    if os.geteuid() == 0:
        options += ["--allow-run-as-root"]
    for name in told:
        options += ["-x", name]
    return options


def _hydra(where: str, *, by_ssh: bool) -> list[str]:
    # It hands all variables on by itself; told to hand on some, MPICH 4.0 loses one on other hosts. In a
    # job of a batch system it knows itself how hosts are reached there.
    if not where:
        return []
    return [*(("-launcher", "ssh") if by_ssh else ()), "-hosts", where]


def flavor(mpirun: str) -> MpiFlavor:
    """Which MPI it is, as it says itself; Open MPI where it is not here.

    Raises:
        PlanError: It is another.
    """
    if shutil.which(mpirun) is None:
        return "open-mpi"
    said = subprocess.run([mpirun, "--version"], capture_output=True, text=True, check=False).stdout
    if "Open MPI" in said or "OpenRTE" in said or "PRTE" in said:
        return "open-mpi"
    if "HYDRA" in said or "Intel(R) MPI" in said:
        return "hydra"
    raise PlanError(
        f"mpi: {mpirun} is of an MPI that isotrain does not know: {said.strip()[:200]!r}. Known are Open"
        f" MPI, MPICH and Intel MPI. Start the ranks by hand: {mpirun} ... isotrain run SPEC --backend"
        " NAME."
    )
