"""Allocation of the batch job that this process runs in: hosts, slots and devices."""

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

_HINT = "Name them with hosts=NODE:SLOTS,..., or say processes=N for this machine alone."


def batch_allocation(variables: Mapping[str, str]) -> Allocation | None:
    """Allocation of the job of SLURM, PBS or LSF with these variables; None: they belong to no job.

    Raises:
        PlanError: The job's hosts file cannot be read, or its variables do not have its hosts.
    """
    if "SLURM_JOB_ID" in variables:
        try:
            return Allocation(slurm_host_slots(variables))
        except ClusterInfoError as error:
            raise PlanError(f"{error} {_HINT}") from error
    if "PBS_NODEFILE" in variables:
        return _read_hosts_file("PBS_NODEFILE", variables["PBS_NODEFILE"])
    if "LSB_DJOB_HOSTFILE" in variables:
        return _read_hosts_file("LSB_DJOB_HOSTFILE", variables["LSB_DJOB_HOSTFILE"])
    return None


def slurm_host_slots(
    variables: Mapping[str, str], tasks: int | None = None, gpus: int | None = None
) -> tuple[HostSlots, ...]:
    """Slots and GPUs of each node of a SLURM job.

    Args:
        variables: Environment variables of a process in the job.
        tasks: Tasks on each node; None: as the job says, else 1.
        gpus: GPUs of each node; None: as the job says, else unknown.

    Raises:
        ClusterInfoError: The variables are incomplete, or contradict each other.
    """
    env = EnvReader("slurm", variables)
    job = env.text("SLURM_JOB_ID")
    hosts = env.required_list("SLURM_JOB_NODELIST", host_list)
    counts: tuple[int, ...] = (tasks or 1,) * len(hosts)
    if tasks is None and env.text("SLURM_TASKS_PER_NODE") is not None:
        counts = env.required_list("SLURM_TASKS_PER_NODE", counts_per_host)
    if len(counts) != len(hosts):
        raise ClusterInfoError(
            f"slurm: job {job}: SLURM_TASKS_PER_NODE is {variables['SLURM_TASKS_PER_NODE']!r}"
            f" (nodes: {len(counts)}), and SLURM_JOB_NODELIST is {variables['SLURM_JOB_NODELIST']!r}"
            f" (nodes: {len(hosts)})."
        )
    devices = env.number("SLURM_GPUS_ON_NODE") if gpus is None else gpus
    return tuple(HostSlots(slots, host, devices) for host, slots in zip(hosts, counts, strict=True))


def _read_hosts_file(variable: str, file: str) -> Allocation:
    """Reads a hosts file: one host name per line, repeated once per slot."""
    try:
        lines = Path(file).read_text(encoding="utf-8").split()
    except OSError as error:
        raise PlanError(
            f"{variable}: {file} has the hosts of this job, and cannot be read: {error.strerror}. {_HINT}"
        ) from error
    if not lines:
        raise PlanError(f"{variable}: {file} has the hosts of this job, and names none.")
    return Allocation(tuple(HostSlots(slots, host) for host, slots in Counter(lines).items()))
