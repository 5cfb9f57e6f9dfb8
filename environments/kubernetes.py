"""Kubernetes: one process in each pod of an Indexed Job, or of a JobSet.

Kubernetes gives every pod of an Indexed Job its number, `JOB_COMPLETION_INDEX`
(https://kubernetes.io/docs/tasks/job/indexed-parallel-processing-static/), and not how many there are. So
the manifest sets:

* `JOB_COMPLETIONS`: `completions` of the Job.
* `JOB_COORDINATOR`: the name by which pods reach the first one, `JOB-0.SERVICE` with a headless service
  (https://kubernetes.io/docs/tasks/job/job-with-pod-to-pod-communication/); in a JobSet the label
  `jobset.sigs.k8s.io/coordinator` is it.
* `JOB_UID`: the label `batch.kubernetes.io/controller-uid`, in a JobSet `jobset.sigs.k8s.io/jobset-uid`.
* In a JobSet of several Jobs, equal in `completions`, from its labels
  (https://jobset.sigs.k8s.io/docs/concepts/): `JOBSET_JOB_INDEX` (`job-global-index`), `JOBSET_JOBS`
  (`global-replicas`), `JOBSET_RESTARTS` (`restart-attempt`).

The pods of a Job that train each on its own have `ISOTRAIN_ENVIRONMENT=none`.
"""

from __future__ import annotations

from collections.abc import Mapping

from isotrain.plugin import EngineVariables, Environment, Place


class Kubernetes(Environment):
    """Reads the variables of a pod of an Indexed Job or JobSet."""

    name = "kubernetes"
    summary = "a pod of an Indexed Job or a JobSet"

    def place(self, variables: Mapping[str, str]) -> Place | None:
        told = EngineVariables(self.name, variables)
        if not told.all_set("JOB_COMPLETION_INDEX", "JOB_COMPLETIONS", "JOB_COORDINATOR"):
            return None
        told.all_set("JOBSET_JOB_INDEX", "JOBSET_JOBS")
        pods, coordinator = told.required_number("JOB_COMPLETIONS"), variables["JOB_COORDINATOR"]
        rank = told.required_number("JOB_COMPLETION_INDEX")
        rank += pods * (told.number("JOBSET_JOB_INDEX") or 0)
        restarts = told.number("JOBSET_RESTARTS") or 0
        return Place(
            engine=self.name,
            rank=rank,
            world_size=pods * (told.number("JOBSET_JOBS") or 1),
            job=f"{told.text('JOB_UID') or coordinator}.{restarts}",
            local_rank=0,
            local_world_size=1,
            node_rank=rank,
            host=told.text("HOSTNAME"),
            coordinator=coordinator,
            restarts=restarts,
            told_by=told.told_by,
        )
