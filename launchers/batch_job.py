"""What a batch system has allocated to the job that this process is in: hosts, slots and devices."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from pathlib import Path

from isotrain.plugin import Allocation, PlanError, Share, counts_per_host, host_list


def allocated(variables: Mapping[str, str]) -> Allocation | None:
    """What a process with these variables may start others on; None: it is in no such job.

    Raises:
        PlanError: The job's file of hosts is not here, or what is told is no list of hosts.
    """
    if "SLURM_JOB_ID" in variables:
        return Allocation(slurm_shares(variables))
    if "PBS_NODEFILE" in variables:
        return _counted("PBS_NODEFILE", variables["PBS_NODEFILE"])
    if "LSB_DJOB_HOSTFILE" in variables:
        return _counted("LSB_DJOB_HOSTFILE", variables["LSB_DJOB_HOSTFILE"])
    return None


def slurm_shares(
    variables: Mapping[str, str], tasks: int | None = None, gpus: int | None = None
) -> tuple[Share, ...]:
    """What each node of a job of SLURM gives.

    Args:
        variables: Of a process in it.
        tasks: On each node; None: as the job says, or one.
        gpus: Of each node; None: as the job says, if it does.
    """
    hosts = host_list(variables["SLURM_JOB_NODELIST"])
    told = variables.get("SLURM_TASKS_PER_NODE")
    if tasks is not None or not told:
        counts = [tasks or 1] * len(hosts)
    else:
        counts = counts_per_host(told)
    found = variables.get("SLURM_GPUS_ON_NODE")
    devices = int(found) if gpus is None and found else gpus
    return tuple(Share(slots, host, devices) for host, slots in zip(hosts, counts, strict=True))


def _counted(variable: str, file: str) -> Allocation:
    """The hosts of a file that has one of them in each line, as often as it has slots."""
    try:
        lines = Path(file).read_text(encoding="utf-8").split()
    except OSError as error:
        raise PlanError(
            f"{variable}: {file} has the hosts of this job, and cannot be read: {error.strerror}. Name them"
            " with hosts=NODE:SLOTS,..., or say processes=N for this machine alone."
        ) from error
    if not lines:
        raise PlanError(f"{variable}: {file} has the hosts of this job, and names none.")
    return Allocation(tuple(Share(slots, host) for host, slots in Counter(lines).items()))
