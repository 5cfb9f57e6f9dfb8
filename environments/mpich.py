"""MPICH, Intel MPI and other MPIs whose `mpiexec` is Hydra.

Hydra (https://github.com/pmodels/mpich/blob/main/doc/wiki/how_to/Using_the_Hydra_Process_Manager.md) speaks
PMI with its processes, so they have `PMI_RANK` and `PMI_SIZE`; it also sets `MPI_LOCALRANKID` and
`MPI_LOCALNRANKS`, which no other launcher does. It sets neither the other hosts nor a name of the job.
"""

from __future__ import annotations

from collections.abc import Mapping

from isotrain.environments.nesting import SCHEDULERS
from isotrain.plugin import ClusterEnvironment, ClusterInfo, EnvReader


class Mpich(ClusterEnvironment):
    """Reads the variables of a process that Hydra started."""

    name = "mpich"
    summary = "mpiexec of MPICH or Intel MPI (Hydra)"
    nested_in = SCHEDULERS

    def cluster_info(self, variables: Mapping[str, str]) -> ClusterInfo | None:
        env = EnvReader(self.name, variables)
        if not env.all_set("MPI_LOCALRANKID", "MPI_LOCALNRANKS"):
            return None
        return ClusterInfo(
            environment=self.name,
            rank=env.required_number("PMI_RANK"),
            world_size=env.required_number("PMI_SIZE"),
            job=self.name,
            local_rank=env.required_number("MPI_LOCALRANKID"),
            local_world_size=env.required_number("MPI_LOCALNRANKS"),
            variables_read=env.variables_read,
        )
