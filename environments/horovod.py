"""Horovod: processes of `horovodrun` with Gloo, and others with the same variables.

By https://horovod.readthedocs.io/en/stable/running.html and `horovod.runner.gloo_run`, every process has
`HOROVOD_RANK`, `HOROVOD_SIZE`, `HOROVOD_LOCAL_RANK`, `HOROVOD_LOCAL_SIZE` and `HOROVOD_HOSTNAME`, and the
address at which `horovodrun` waits for them, `HOROVOD_GLOO_RENDEZVOUS_ADDR` and
`HOROVOD_GLOO_RENDEZVOUS_PORT`. Rank 0 is on that host too, unless `horovodrun` was given other hosts only.
(`HOROVOD_CROSS_RANK` is not the node rank: it counts only the hosts that have this local rank.) With MPI,
`horovodrun` starts `mpirun`, and the rank is in the variables of that.
"""

from __future__ import annotations

from collections.abc import Mapping

from isotrain.environments.nesting import OUTER_LAUNCHERS
from isotrain.plugin import ClusterEnvironment, ClusterInfo, ClusterInfoError, EnvReader


class Horovod(ClusterEnvironment):
    """Reads the variables of a process of `horovodrun`."""

    name = "horovod"
    summary = "horovodrun with Gloo"
    nested_in = OUTER_LAUNCHERS

    def cluster_info(self, variables: Mapping[str, str]) -> ClusterInfo | None:
        env = EnvReader(self.name, variables)
        if not env.all_set("HOROVOD_RANK", "HOROVOD_SIZE"):
            return None
        if env.text("HOROVOD_ELASTIC"):
            raise ClusterInfoError(
                "horovod: HOROVOD_ELASTIC is set: under an elastic horovodrun the ranks change during the"
                " run, and environment variables do not have them. Start horovodrun without --min-np,"
                " --max-np and --host-discovery-script."
            )
        address = env.text("HOROVOD_GLOO_RENDEZVOUS_ADDR")
        return ClusterInfo(
            environment=self.name,
            rank=env.required_number("HOROVOD_RANK"),
            world_size=env.required_number("HOROVOD_SIZE"),
            job=f"{address or self.name}:{env.text('HOROVOD_GLOO_RENDEZVOUS_PORT') or ''}",
            local_rank=env.number("HOROVOD_LOCAL_RANK"),
            local_world_size=env.number("HOROVOD_LOCAL_SIZE"),
            host=env.text("HOROVOD_HOSTNAME"),
            coordinator=address,
            variables_read=env.variables_read,
        )
