"""PMI and PMIx: the protocols between launchers and the MPI processes that they start.

PMI-1 (https://flux-framework.readthedocs.io/projects/flux-rfc/en/latest/spec_13.html) sets `PMI_RANK` and
`PMI_SIZE`. SLURM, Flux, Hydra and others set them beside more variables of their own: this environment is
for launchers that set nothing else. PMIx (https://docs.openpmix.org) sets `PMIX_RANK` and `PMIX_NAMESPACE`;
the number of processes is available only through its library, so a launcher that sets nothing else leaves
the variables incomplete.
"""

from __future__ import annotations

from collections.abc import Mapping

from isotrain.plugin import ClusterEnvironment, ClusterInfo, EnvReader


class Pmi(ClusterEnvironment):
    """Reads the variables of PMI."""

    name = "pmi"
    summary = "any other launcher that speaks PMI"

    def cluster_info(self, variables: Mapping[str, str]) -> ClusterInfo | None:
        env = EnvReader(self.name, variables)
        if not (env.all_set("PMI_RANK", "PMI_SIZE") or env.text("PMIX_RANK")):
            return None
        return ClusterInfo(
            environment=self.name,
            rank=env.required_number("PMI_RANK"),
            world_size=env.required_number("PMI_SIZE"),
            job=env.text("PMI_JOBID") or self.name,
            local_rank=env.number("PMI_LOCAL_RANK"),
            local_world_size=env.number("PMI_LOCAL_SIZE"),
            variables_read=env.variables_read,
        )
