"""PBS: tasks of `pbsdsh`.

A job's script is its first task, `PBS_TASKNUM` 1, and starts others with `pbsdsh` or, more often, with MPI,
which then sets the rank. Torque sets the slot of each task of `pbsdsh`, `PBS_VNODENUM`, and the number of
slots, `PBS_NP`
(https://docs.adaptivecomputing.com/torque/6-1-2/adminGuide/torque.htm#topics/torque/2-jobs/exportedBatchEnvVar.htm).
OpenPBS and PBS Professional (https://github.com/openpbs/openpbs/blob/master/doc/man1/pbsdsh.1B) do not: a
task of their `pbsdsh` has incomplete variables.
"""

from __future__ import annotations

from collections.abc import Mapping

from isotrain.environments.nesting import PROTOCOLS
from isotrain.plugin import ClusterEnvironment, ClusterInfo, EnvReader


class Pbs(ClusterEnvironment):
    """Reads the variables of a task of `pbsdsh`."""

    name = "pbs"
    summary = "a task of pbsdsh, of Torque"
    nested_in = PROTOCOLS

    def cluster_info(self, variables: Mapping[str, str]) -> ClusterInfo | None:
        env = EnvReader(self.name, variables)
        if not env.all_set("PBS_JOBID", "PBS_TASKNUM") or env.number("PBS_TASKNUM") == 1:
            return None
        env.all_set("PBS_TASKNUM", "PBS_VNODENUM", "PBS_NP")
        return ClusterInfo(
            environment=self.name,
            rank=env.required_number("PBS_VNODENUM"),
            world_size=env.required_number("PBS_NP"),
            job=env.required_text("PBS_JOBID"),
            node_rank=env.number("PBS_NODENUM"),
            variables_read=env.variables_read,
        )
