"""Flux: tasks of `flux run` and `flux submit`.

By https://flux-framework.readthedocs.io/projects/flux-core/en/latest/man7/flux-environment.html every task
has `FLUX_TASK_RANK`, `FLUX_JOB_SIZE`, `FLUX_TASK_LOCAL_ID`, `FLUX_JOB_NNODES`, and `FLUX_JOB_ID`, or better
`FLUX_JOB_ID_PATH`: an instance of Flux may be a job of another one, and numbers its own. Flux does not say
which hosts there are, nor how many tasks each has; the script of `flux batch` has none of these variables
of its own.
"""

from __future__ import annotations

from collections.abc import Mapping

from isotrain.environments.nesting import SPOKEN
from isotrain.plugin import EngineVariables, Environment, Place


class Flux(Environment):
    """Reads the variables of a task of a Flux job."""

    name = "flux"
    summary = "a task of flux run or flux submit"
    inside = SPOKEN | {"slurm", "lsf", "pbs", "pals", "kubernetes"}

    def place(self, variables: Mapping[str, str]) -> Place | None:
        told = EngineVariables(self.name, variables)
        if not told.all_set("FLUX_TASK_RANK", "FLUX_JOB_SIZE"):
            return None
        size = told.required_number("FLUX_JOB_SIZE")
        return Place(
            engine=self.name,
            rank=told.required_number("FLUX_TASK_RANK"),
            world_size=size,
            job=told.text("FLUX_JOB_ID_PATH") or told.required_text("FLUX_JOB_ID"),
            local_rank=told.number("FLUX_TASK_LOCAL_ID"),
            local_world_size=size if told.number("FLUX_JOB_NNODES") == 1 else None,
            told_by=told.told_by,
        )
