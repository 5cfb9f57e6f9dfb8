"""LSF: tasks of `jsrun`, IBM's job step manager.

By https://www.ibm.com/docs/en/spectrum-lsf and the guide to Summit
(https://docs.olcf.ornl.gov/systems/summit_user_guide.html), every task of `jsrun` has `JSM_NAMESPACE_RANK`,
`JSM_NAMESPACE_SIZE`, `JSM_NAMESPACE_LOCAL_RANK` and `JSM_NAMESPACE_LOCAL_SIZE`, and from its job `LSB_JOBID`
and `LSB_MCPU_HOSTS`: hosts, each with its number of slots. The first host is the one on which `jsrun` was
started; no task runs there. Jobs without `jsrun` start their processes by MPI.
"""

from __future__ import annotations

from collections.abc import Mapping

from isotrain.environments.nesting import PROTOCOLS
from isotrain.plugin import ClusterEnvironment, ClusterInfo, EnvReader


class Lsf(ClusterEnvironment):
    """Reads the variables of a task of `jsrun`."""

    name = "lsf"
    summary = "a task of jsrun"
    nested_in = PROTOCOLS

    def cluster_info(self, variables: Mapping[str, str]) -> ClusterInfo | None:
        env = EnvReader(self.name, variables)
        if not env.all_set("JSM_NAMESPACE_RANK", "JSM_NAMESPACE_SIZE"):
            return None
        hosts = tuple((env.text("LSB_MCPU_HOSTS") or "").split()[2::2])
        return ClusterInfo(
            environment=self.name,
            rank=env.required_number("JSM_NAMESPACE_RANK"),
            world_size=env.required_number("JSM_NAMESPACE_SIZE"),
            job=env.required_text("LSB_JOBID"),
            local_rank=env.number("JSM_NAMESPACE_LOCAL_RANK"),
            local_world_size=env.number("JSM_NAMESPACE_LOCAL_SIZE"),
            hosts=hosts,
            coordinator=hosts[0] if hosts else None,
            variables_read=env.variables_read,
        )
