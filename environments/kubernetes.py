"""Kubernetes: one process in each pod of an Indexed Job, or of a JobSet.

Kubernetes gives every pod of an Indexed Job its index, `JOB_COMPLETION_INDEX`
(https://kubernetes.io/docs/tasks/job/indexed-parallel-processing-static/), but not the number of pods. So
the manifest sets:

* `JOB_COMPLETIONS`: `completions` of the Job.
* `JOB_COORDINATOR`: the host name of the first pod, `JOB-0.SERVICE` with a headless service
  (https://kubernetes.io/docs/tasks/job/job-with-pod-to-pod-communication/); in a JobSet it is the label
  `jobset.sigs.k8s.io/coordinator`.
* `JOB_UID`: the label `batch.kubernetes.io/controller-uid`, in a JobSet `jobset.sigs.k8s.io/jobset-uid`.
* In a JobSet of several Jobs, equal in `completions`, from its labels
  (https://jobset.sigs.k8s.io/docs/concepts/): `JOBSET_JOB_INDEX` (`job-global-index`), `JOBSET_JOBS`
  (`global-replicas`), `JOBSET_RESTARTS` (`restart-attempt`).

If each pod of a Job trains on its own, set `ISOTRAIN_ENVIRONMENT=none`.
"""

from __future__ import annotations

from collections.abc import Mapping

from isotrain.plugin import ClusterEnvironment, ClusterInfo, EnvReader


class Kubernetes(ClusterEnvironment):
    """Reads the variables of a pod of an Indexed Job or JobSet."""

    name = "kubernetes"
    summary = "a pod of an Indexed Job or a JobSet"

    def cluster_info(self, variables: Mapping[str, str]) -> ClusterInfo | None:
        env = EnvReader(self.name, variables)
        if not env.all_set("JOB_COMPLETION_INDEX", "JOB_COMPLETIONS", "JOB_COORDINATOR"):
            return None
        env.all_set("JOBSET_JOB_INDEX", "JOBSET_JOBS")
        pods, coordinator = env.required_number("JOB_COMPLETIONS"), variables["JOB_COORDINATOR"]
        rank = env.required_number("JOB_COMPLETION_INDEX")
        rank += pods * (env.number("JOBSET_JOB_INDEX") or 0)
        restarts = env.number("JOBSET_RESTARTS") or 0
        return ClusterInfo(
            environment=self.name,
            rank=rank,
            world_size=pods * (env.number("JOBSET_JOBS") or 1),
            job=f"{env.text('JOB_UID') or coordinator}.{restarts}",
            local_rank=0,
            local_world_size=1,
            node_rank=rank,
            host=env.text("HOSTNAME"),
            coordinator=coordinator,
            restarts=restarts,
            variables_read=env.variables_read,
        )
