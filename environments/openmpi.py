"""Open MPI and MPIs derived from it: processes of `mpirun`.

By https://docs.open-mpi.org/en/v5.0.x/tuning-apps/environment-var.html every process has
`OMPI_COMM_WORLD_RANK`, `OMPI_COMM_WORLD_SIZE`, `OMPI_COMM_WORLD_LOCAL_RANK` and
`OMPI_COMM_WORLD_LOCAL_SIZE`. (`OMPI_COMM_WORLD_NODE_RANK` is not the node rank: it counts the processes of
all jobs on the node.) PMIx sets the names of the host and of the job, `PMIX_HOSTNAME` and `PMIX_NAMESPACE`
(https://docs.openpmix.org).

No variable has the host of rank 0. It is the host of `mpirun`, unless that was given other hosts only. The
host of `mpirun` is in its address up to version 4, and from version 5 on in the name of the job,
`prterun-HOST-PID@NUMBER`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from isotrain.environments.nesting import SCHEDULERS
from isotrain.plugin import ClusterEnvironment, ClusterInfo, EnvReader

_ADDRESS = re.compile(r"[^;]+;tcp://(?P<host>[^,:]+)[,:]")
_NAMESPACE = re.compile(r"prterun-(?P<host>.+)-\d+@\d+")


class OpenMPI(ClusterEnvironment):
    """Reads the variables of a process of Open MPI, Spectrum MPI and other derivatives."""

    name = "openmpi"
    summary = "mpirun of Open MPI"
    nested_in = SCHEDULERS

    def cluster_info(self, variables: Mapping[str, str]) -> ClusterInfo | None:
        env = EnvReader(self.name, variables)
        if not env.all_set("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"):
            return None
        return ClusterInfo(
            environment=self.name,
            rank=env.required_number("OMPI_COMM_WORLD_RANK"),
            world_size=env.required_number("OMPI_COMM_WORLD_SIZE"),
            job=env.text("PMIX_NAMESPACE") or env.text("OMPI_MCA_ess_base_jobid") or self.name,
            local_rank=env.number("OMPI_COMM_WORLD_LOCAL_RANK"),
            local_world_size=env.number("OMPI_COMM_WORLD_LOCAL_SIZE"),
            host=env.text("PMIX_HOSTNAME"),
            coordinator=_host_of_mpirun(env),
            variables_read=env.variables_read,
        )

    def secret(self, variables: Mapping[str, str]) -> str | None:
        # Up to version 4: 128 random bits by which the transports of one job authenticate each other.
        return variables.get("OMPI_MCA_orte_precondition_transports")


def _host_of_mpirun(env: EnvReader) -> str | None:
    match = _ADDRESS.match(env.text("OMPI_MCA_orte_hnp_uri") or "")
    match = match or _NAMESPACE.fullmatch(env.text("PMIX_NAMESPACE") or "")
    return match["host"] if match else None
