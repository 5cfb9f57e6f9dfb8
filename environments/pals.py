"""PALS: applications of HPE Cray's launcher, `mpiexec` or `aprun`, in a job of PBS or SLURM.

By its manual (https://cpe.ext.hpe.com/docs/latest/pals) every process has `PALS_RANKID`,
`PALS_LOCAL_RANKID`, `PALS_LOCAL_SIZE`, `PALS_NODEID` and `PALS_APID`, and by PMI `PMI_SIZE`.
"""

from __future__ import annotations

from collections.abc import Mapping

from isotrain.environments.nesting import SPOKEN
from isotrain.plugin import EngineVariables, Environment, Place


class Pals(Environment):
    """Reads the variables of a process of PALS."""

    name = "pals"
    summary = "mpiexec or aprun of HPE Cray (PALS)"
    inside = SPOKEN | {"pbs", "slurm"}

    def place(self, variables: Mapping[str, str]) -> Place | None:
        told = EngineVariables(self.name, variables)
        if not told.all_set("PALS_RANKID", "PALS_APID"):
            return None
        return Place(
            engine=self.name,
            rank=told.required_number("PALS_RANKID"),
            world_size=told.required_number("PMI_SIZE"),
            job=told.required_text("PALS_APID"),
            local_rank=told.number("PALS_LOCAL_RANKID"),
            local_world_size=told.number("PALS_LOCAL_SIZE"),
            node_rank=told.number("PALS_NODEID"),
            told_by=told.told_by,
        )
