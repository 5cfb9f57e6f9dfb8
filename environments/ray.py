"""Ray: workers of Ray Train, as a person tells their place.

Ray tells a worker who it is by functions, `ray.train.get_context()`
(https://docs.ray.io/en/latest/train/api/doc/ray.train.TrainContext.html), and only `TorchTrainer` sets
variables too: those of `torchrun`. Under another trainer, the worker's function sets these, each to what
the function of that name gives: `RAY_TRAIN_WORLD_RANK`, `RAY_TRAIN_WORLD_SIZE`, `RAY_TRAIN_LOCAL_RANK`,
`RAY_TRAIN_LOCAL_WORLD_SIZE`, `RAY_TRAIN_NODE_RANK`, `RAY_TRAIN_EXPERIMENT_NAME`; and
`RAY_TRAIN_COORDINATOR` to the address of the worker of rank 0. So does the launcher `ray`.

Ray itself sets `RAY_JOB_ID`, but not to the job's number in workers that it had started before the job came;
the function sets it to `ray.get_runtime_context().get_job_id()`.
"""

from __future__ import annotations

from collections.abc import Mapping

from isotrain.environments.nesting import SCHEDULERS
from isotrain.plugin import EngineVariables, Environment, Place, PlaceError

_OF_NO_JOB = "ffffffff"


class Ray(Environment):
    """Reads the variables of a worker of Ray Train."""

    name = "ray"
    summary = "a worker of Ray Train that sets RAY_TRAIN_WORLD_RANK and so on"
    inside = SCHEDULERS

    def place(self, variables: Mapping[str, str]) -> Place | None:
        told = EngineVariables(self.name, variables)
        if not told.all_set("RAY_TRAIN_WORLD_RANK", "RAY_TRAIN_WORLD_SIZE"):
            return None
        return Place(
            engine=self.name,
            rank=told.required_number("RAY_TRAIN_WORLD_RANK"),
            world_size=told.required_number("RAY_TRAIN_WORLD_SIZE"),
            job=_job(told) or self.name,
            local_rank=told.number("RAY_TRAIN_LOCAL_RANK"),
            local_world_size=told.number("RAY_TRAIN_LOCAL_WORLD_SIZE"),
            node_rank=told.number("RAY_TRAIN_NODE_RANK"),
            coordinator=told.required_text("RAY_TRAIN_COORDINATOR"),
            told_by=told.told_by,
        )


def _job(told: EngineVariables) -> str:
    number, name = told.text("RAY_JOB_ID"), told.text("RAY_TRAIN_EXPERIMENT_NAME")
    if number == _OF_NO_JOB:
        raise PlaceError(
            f"ray: RAY_JOB_ID is {number}: Ray had started this worker before its job came. Set it to"
            " ray.get_runtime_context().get_job_id(), in all workers."
        )
    return "/".join(filter(None, (number, name)))
