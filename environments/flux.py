"""Flux: tasks of `flux run` and `flux submit`.

By https://flux-framework.readthedocs.io/projects/flux-core/en/latest/man7/flux-environment.html every task
has `FLUX_TASK_RANK`, `FLUX_JOB_SIZE`, `FLUX_TASK_LOCAL_ID`, `FLUX_JOB_NNODES`, and `FLUX_JOB_ID`, or better
`FLUX_JOB_ID_PATH`: an instance of Flux may be a job of another one, and numbers its own jobs. Flux sets
neither the host names nor the number of tasks on each host; it sets none of these variables for the script
of `flux batch` itself.
"""

from __future__ import annotations

from collections.abc import Mapping

from isotrain.environments.nesting import PROTOCOLS
from isotrain.plugin import ClusterEnvironment, ClusterInfo, EnvReader


class Flux(ClusterEnvironment):
    """Reads the variables of a task of a Flux job."""

    name = "flux"
    summary = "a task of flux run or flux submit"
    nested_in = PROTOCOLS | {"slurm", "lsf", "pbs", "pals", "kubernetes"}

    def cluster_info(self, variables: Mapping[str, str]) -> ClusterInfo | None:
        env = EnvReader(self.name, variables)
        if not env.all_set("FLUX_TASK_RANK", "FLUX_JOB_SIZE"):
            return None
        size = env.required_number("FLUX_JOB_SIZE")
        return ClusterInfo(
            environment=self.name,
            rank=env.required_number("FLUX_TASK_RANK"),
            world_size=size,
            job=env.text("FLUX_JOB_ID_PATH") or env.required_text("FLUX_JOB_ID"),
            local_rank=env.number("FLUX_TASK_LOCAL_ID"),
            local_world_size=size if env.number("FLUX_JOB_NNODES") == 1 else None,
            variables_read=env.variables_read,
        )
