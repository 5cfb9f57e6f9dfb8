"""Ray: workers of Ray Train, as a person tells their place.

Ray tells a worker who it is by functions, `ray.train.get_context()`
(https://docs.ray.io/en/latest/train/api/doc/ray.train.TrainContext.html), and only `TorchTrainer` sets
variables too: those of `torchrun`. Under another trainer, the worker's function sets these, each to what
the function of that name gives: `RAY_TRAIN_WORLD_RANK`, `RAY_TRAIN_WORLD_SIZE`, `RAY_TRAIN_LOCAL_RANK`,
`RAY_TRAIN_LOCAL_WORLD_SIZE`, `RAY_TRAIN_NODE_RANK`, `RAY_TRAIN_EXPERIMENT_NAME`; and
`RAY_TRAIN_COORDINATOR` to the address of the worker of rank 0. Ray itself sets `RAY_JOB_ID`.
"""

from __future__ import annotations

from collections.abc import Mapping

from isotrain.environments.nesting import SCHEDULERS
from isotrain.plugin import EngineVariables, Environment, Place


class Ray(Environment):
    """Reads the variables of a worker of Ray Train."""

    name = "ray"
    summary = "a worker of Ray Train that sets RAY_TRAIN_WORLD_RANK and so on"
    inside = SCHEDULERS

    def place(self, variables: Mapping[str, str]) -> Place | None:
        told = EngineVariables(self.name, variables)
        if not told.all_set("RAY_TRAIN_WORLD_RANK", "RAY_TRAIN_WORLD_SIZE"):
            return None
        names = told.text("RAY_JOB_ID"), told.text("RAY_TRAIN_EXPERIMENT_NAME")
        return Place(
            engine=self.name,
            rank=told.required_number("RAY_TRAIN_WORLD_RANK"),
            world_size=told.required_number("RAY_TRAIN_WORLD_SIZE"),
            job="/".join(filter(None, names)) or self.name,
            local_rank=told.number("RAY_TRAIN_LOCAL_RANK"),
            local_world_size=told.number("RAY_TRAIN_LOCAL_WORLD_SIZE"),
            node_rank=told.number("RAY_TRAIN_NODE_RANK"),
            coordinator=told.required_text("RAY_TRAIN_COORDINATOR"),
            told_by=told.told_by,
        )
