"""What a batch system has allocated to the job that this process is in: hosts, slots and devices."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from pathlib import Path

from isotrain.plugin import (
    Allocation,
    ClusterInfoError,
    EnvReader,
    HostSlots,
    PlanError,
    counts_per_host,
    host_list,
)

_OTHERWISE = "Name them with hosts=NODE:SLOTS,..., or say processes=N for this machine alone."


def allocated(variables: Mapping[str, str]) -> Allocation | None:
    """What a process with these variables may start others on; None: it is in no such job.

    Raises:
        PlanError: The job's file of hosts is not here, or its variables do not say which hosts it has.
    """
    if "SLURM_JOB_ID" in variables:
        try:
            return Allocation(slurm_host_slots(variables))
        except ClusterInfoError as error:
            raise PlanError(f"{error} {_OTHERWISE}") from error
    if "PBS_NODEFILE" in variables:
        return _counted("PBS_NODEFILE", variables["PBS_NODEFILE"])
    if "LSB_DJOB_HOSTFILE" in variables:
        return _counted("LSB_DJOB_HOSTFILE", variables["LSB_DJOB_HOSTFILE"])
    return None


def slurm_host_slots(
    variables: Mapping[str, str], tasks: int | None = None, gpus: int | None = None
) -> tuple[HostSlots, ...]:
    """What each node of a job of SLURM gives.

    Args:
        variables: Of a process in it.
        tasks: On each node; None: as the job says, or one.
        gpus: Of each node; None: as the job says, if it does.

    Raises:
        ClusterInfoError: The variables are half set, or do not fit each other.
    """
    told = EnvReader("slurm", variables)
    job = told.text("SLURM_JOB_ID")
    hosts = told.required_list("SLURM_JOB_NODELIST", host_list)
    counts: tuple[int, ...] = (tasks or 1,) * len(hosts)
    if tasks is None and told.text("SLURM_TASKS_PER_NODE") is not None:
        counts = told.required_list("SLURM_TASKS_PER_NODE", counts_per_host)
    if len(counts) != len(hosts):
        raise ClusterInfoError(
            f"slurm: SLURM_TASKS_PER_NODE is {variables['SLURM_TASKS_PER_NODE']!r}, for {len(counts)} nodes,"
            f" and SLURM_JOB_NODELIST is {variables['SLURM_JOB_NODELIST']!r}: job {job} has {len(hosts)}."
        )
    devices = told.number("SLURM_GPUS_ON_NODE") if gpus is None else gpus
    return tuple(HostSlots(slots, host, devices) for host, slots in zip(hosts, counts, strict=True))


def _counted(variable: str, file: str) -> Allocation:
    """The hosts of a file that has one of them in each line, as often as it has slots."""
    try:
        lines = Path(file).read_text(encoding="utf-8").split()
    except OSError as error:
        raise PlanError(
            f"{variable}: {file} has the hosts of this job, and cannot be read: {error.strerror}."
            f" {_OTHERWISE}"
        ) from error
    if not lines:
        raise PlanError(f"{variable}: {file} has the hosts of this job, and names none.")
    return Allocation(tuple(HostSlots(slots, host) for host, slots in Counter(lines).items()))
