"""Ray: workers of Ray Train, with variables that the user's training function sets.

Ray gives a worker its rank by functions, `ray.train.get_context()`
(https://docs.ray.io/en/latest/train/api/doc/ray.train.TrainContext.html), and only `TorchTrainer` sets
variables too: those of `torchrun`. Under another trainer, the training function sets these, each to the
result of the context's method of that name: `RAY_TRAIN_WORLD_RANK`, `RAY_TRAIN_WORLD_SIZE`,
`RAY_TRAIN_LOCAL_RANK`, `RAY_TRAIN_LOCAL_WORLD_SIZE`, `RAY_TRAIN_NODE_RANK`, `RAY_TRAIN_EXPERIMENT_NAME`; and
`RAY_TRAIN_COORDINATOR` to the address of the worker of rank 0. The launcher `ray` sets the same, and
`ISOTRAIN_RAY_ELASTIC` where it lets the other ranks go on when one is lost.

Ray itself sets `RAY_JOB_ID`, but to no job in workers that it started before the job arrived; the training
function sets it to `ray.get_runtime_context().get_job_id()`.
"""

from __future__ import annotations

from collections.abc import Mapping

from isotrain.environments.nesting import SCHEDULERS
from isotrain.plugin import ClusterEnvironment, ClusterInfo, ClusterInfoError, EnvReader

_NO_JOB = "ffffffff"


class Ray(ClusterEnvironment):
    """Reads the variables of a worker of Ray Train."""

    name = "ray"
    summary = "a worker of Ray Train that sets RAY_TRAIN_WORLD_RANK and so on"
    nested_in = SCHEDULERS

    def why_not_elastic(self, variables: Mapping[str, str]) -> str | None:
        if "ISOTRAIN_RAY_ELASTIC" in variables:
            return None
        return (
            "Ray Train ends all workers when one is lost. Start the run with --launcher ray, which lets the"
            " others go on; or by srun, or by the local launcher"
        )

    def cluster_info(self, variables: Mapping[str, str]) -> ClusterInfo | None:
        env = EnvReader(self.name, variables)
        if not env.all_set("RAY_TRAIN_WORLD_RANK", "RAY_TRAIN_WORLD_SIZE"):
            return None
        return ClusterInfo(
            environment=self.name,
            rank=env.required_number("RAY_TRAIN_WORLD_RANK"),
            world_size=env.required_number("RAY_TRAIN_WORLD_SIZE"),
            job=_job(env) or self.name,
            local_rank=env.number("RAY_TRAIN_LOCAL_RANK"),
            local_world_size=env.number("RAY_TRAIN_LOCAL_WORLD_SIZE"),
            node_rank=env.number("RAY_TRAIN_NODE_RANK"),
            coordinator=env.required_text("RAY_TRAIN_COORDINATOR"),
            variables_read=env.variables_read,
        )


def _job(env: EnvReader) -> str:
    job_id, name = env.text("RAY_JOB_ID"), env.text("RAY_TRAIN_EXPERIMENT_NAME")
    if job_id == _NO_JOB:
        raise ClusterInfoError(
            f"ray: RAY_JOB_ID is {job_id}: Ray started this worker before its job arrived. Set it to"
            " ray.get_runtime_context().get_job_id(), in all workers."
        )
    return "/".join(filter(None, (job_id, name)))
