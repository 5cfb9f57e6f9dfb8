"""SLURM: the tasks of a step, which `srun` starts, also of a heterogeneous job.

By https://slurm.schedmd.com/srun.html every task has `SLURM_PROCID`, `SLURM_LOCALID` and `SLURM_NODEID`
(rank, local rank and node rank), `SLURMD_NODENAME`, and of its step
`SLURM_STEP_ID`, `SLURM_STEP_NUM_TASKS`, `SLURM_STEP_NODELIST` and `SLURM_STEP_TASKS_PER_NODE`. A step may
use fewer hosts than its job, so what describes the job (`SLURM_JOB_NODELIST`, `SLURM_NTASKS`) does not
describe its processes. A step over several components of a heterogeneous job counts tasks and hosts over
all of them (https://slurm.schedmd.com/heterogeneous_jobs.html); variables that end in `_HET_GROUP_0`
describe the job.

The script of `sbatch` and the shell of `salloc` are no such tasks, though they have some of these
variables: the script lacks those of a step, and the shell is a step with a reserved number (slurm.h).
`SLURM_RESTART_COUNT` is set after a requeue (https://slurm.schedmd.com/sbatch.html).
"""

from __future__ import annotations

from collections.abc import Mapping

from isotrain.environments.nesting import PROTOCOLS
from isotrain.plugin import ClusterEnvironment, ClusterInfo, EnvReader, counts_per_host, host_list

_NON_TASK_STEPS = {"4294967290", "-6", "4294967291", "-5", "4294967292", "-4"}
"""Step numbers of shells, batch scripts and external processes (slurm.h), unsigned and signed."""


class Slurm(ClusterEnvironment):
    """Reads the variables of a task of a SLURM step."""

    name = "slurm"
    summary = "a task of srun, in a job of sbatch or salloc or of its own"
    nested_in = PROTOCOLS

    def why_not_elastic(self, variables: Mapping[str, str]) -> str | None:
        return None

    def cluster_info(self, variables: Mapping[str, str]) -> ClusterInfo | None:
        env = EnvReader(self.name, variables)
        if env.text("SLURM_STEP_NUM_TASKS") is None or env.text("SLURM_STEP_ID") in _NON_TASK_STEPS:
            return None
        env.all_set("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_PROCID", "SLURM_LOCALID")
        node_rank = env.required_number("SLURM_NODEID")
        tasks = env.required_list("SLURM_STEP_TASKS_PER_NODE", counts_per_host)
        restarts = env.number("SLURM_RESTART_COUNT") or 0
        hosts = env.required_list("SLURM_STEP_NODELIST", host_list)
        return ClusterInfo(
            environment=self.name,
            rank=env.required_number("SLURM_PROCID"),
            world_size=env.required_number("SLURM_STEP_NUM_TASKS"),
            job=".".join([variables["SLURM_JOB_ID"], variables["SLURM_STEP_ID"], str(restarts)]),
            local_rank=env.required_number("SLURM_LOCALID"),
            local_world_size=tasks[node_rank] if node_rank < len(tasks) else None,
            node_rank=node_rank,
            host=env.text("SLURMD_NODENAME"),
            hosts=hosts,
            coordinator=hosts[0],
            restarts=restarts,
            variables_read=env.variables_read,
        )
