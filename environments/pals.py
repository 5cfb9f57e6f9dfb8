"""PALS: HPE Cray's launcher, `mpiexec` or `aprun`, in a job of PBS or SLURM.

By its manual (https://cpe.ext.hpe.com/docs/latest/pals) every process has `PALS_RANKID`,
`PALS_LOCAL_RANKID`, `PALS_LOCAL_SIZE`, `PALS_NODEID` and `PALS_APID`, and from PMI `PMI_SIZE`.
"""

from __future__ import annotations

from collections.abc import Mapping

from isotrain.environments.nesting import PROTOCOLS
from isotrain.plugin import ClusterEnvironment, ClusterInfo, EnvReader


class Pals(ClusterEnvironment):
    """Reads the variables of a process of PALS."""

    name = "pals"
    summary = "mpiexec or aprun of HPE Cray (PALS)"
    nested_in = PROTOCOLS | {"pbs", "slurm"}

    def cluster_info(self, variables: Mapping[str, str]) -> ClusterInfo | None:
        env = EnvReader(self.name, variables)
        if not env.all_set("PALS_RANKID", "PALS_APID"):
            return None
        return ClusterInfo(
            environment=self.name,
            rank=env.required_number("PALS_RANKID"),
            world_size=env.required_number("PMI_SIZE"),
            job=env.required_text("PALS_APID"),
            local_rank=env.number("PALS_LOCAL_RANKID"),
            local_world_size=env.number("PALS_LOCAL_SIZE"),
            node_rank=env.number("PALS_NODEID"),
            variables_read=env.variables_read,
        )
