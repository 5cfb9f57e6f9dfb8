"""torchrun, and all who set what PyTorch's `env://` rendezvous reads.

By https://docs.pytorch.org/docs/stable/elastic/run.html, torchrun sets `RANK`, `WORLD_SIZE`, `LOCAL_RANK`,
`LOCAL_WORLD_SIZE`, `GROUP_RANK` (of the agent, which is the host where each has one), `MASTER_ADDR`,
`MASTER_PORT`, `TORCHELASTIC_RUN_ID` and `TORCHELASTIC_RESTART_COUNT`. That every process is given the first
two and the address of rank 0 is all that https://docs.pytorch.org/docs/stable/distributed.html asks of
others, such as Kubeflow's PyTorchJob and shell scripts. `MASTER_ADDR` and `MASTER_PORT` alone say nothing
of who a process is: scripts for other launchers export them.
"""

from __future__ import annotations

from collections.abc import Mapping

from isotrain.environments.nesting import STARTERS
from isotrain.plugin import ClusterEnvironment, ClusterInfo, EnvReader


class Torchrun(ClusterEnvironment):
    """Reads the variables of PyTorch's launcher."""

    name = "torchrun"
    summary = "torchrun, or RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT set by another"
    nested_in = STARTERS

    def cluster_info(self, variables: Mapping[str, str]) -> ClusterInfo | None:
        env = EnvReader(self.name, variables)
        if not env.all_set("RANK", "WORLD_SIZE"):
            return None
        coordinator, port = env.required_text("MASTER_ADDR"), env.required_number("MASTER_PORT")
        # The count of restarts is each agent's own, so it cannot be part of the job's name.
        run = env.text("TORCHELASTIC_RUN_ID") or "env"
        return ClusterInfo(
            environment=self.name,
            rank=env.required_number("RANK"),
            world_size=env.required_number("WORLD_SIZE"),
            job=f"{run}@{coordinator}:{port}",
            local_rank=env.number("LOCAL_RANK"),
            local_world_size=env.number("LOCAL_WORLD_SIZE"),
            node_rank=env.number("GROUP_RANK"),
            coordinator=coordinator,
            # The agents meet there, and go on using it.
            port=None if env.text("TORCHELASTIC_USE_AGENT_STORE") == "True" else port,
            restarts=env.number("TORCHELASTIC_RESTART_COUNT") or 0,
            variables_read=env.variables_read,
        )
