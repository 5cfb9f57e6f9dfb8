"""torchrun, and other launchers that set the variables of PyTorch's `env://` rendezvous.

By https://docs.pytorch.org/docs/stable/elastic/run.html, torchrun sets `RANK`, `WORLD_SIZE`, `LOCAL_RANK`,
`LOCAL_WORLD_SIZE`, `GROUP_RANK` (of the agent; the node rank if each host has one agent), `MASTER_ADDR`,
`MASTER_PORT`, `TORCHELASTIC_RUN_ID` and `TORCHELASTIC_RESTART_COUNT`. From other launchers, such as
Kubeflow's PyTorchJob and shell scripts, https://docs.pytorch.org/docs/stable/distributed.html requires only
the first two and the address of rank 0. `MASTER_ADDR` and `MASTER_PORT` alone do not identify a process:
scripts for other launchers export them.
"""

from __future__ import annotations

from collections.abc import Mapping

from isotrain.environments.nesting import OUTER_LAUNCHERS
from isotrain.plugin import ClusterEnvironment, ClusterInfo, EnvReader


class Torchrun(ClusterEnvironment):
    """Reads the variables of PyTorch's launcher."""

    name = "torchrun"
    summary = "torchrun, or RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT set by another"
    nested_in = OUTER_LAUNCHERS

    def why_not_elastic(self, variables: Mapping[str, str]) -> str | None:
        if (
            "TORCHELASTIC_RUN_ID" not in variables
        ):  # a script's processes do not depend on each other
            return None
        return (
            "torchrun ends all processes when one is lost, and starts them anew: let them go on from the last"
            " checkpoint by --resume auto. Or start them by srun, or by the local launcher"
        )

    def cluster_info(self, variables: Mapping[str, str]) -> ClusterInfo | None:
        env = EnvReader(self.name, variables)
        if not env.all_set("RANK", "WORLD_SIZE"):
            return None
        coordinator, port = env.required_text("MASTER_ADDR"), env.required_number("MASTER_PORT")
        # Each agent counts restarts by itself, so the count cannot be part of the job's name.
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
            # The agents' store listens there, and keeps the port.
            port=None if env.text("TORCHELASTIC_USE_AGENT_STORE") == "True" else port,
            restarts=env.number("TORCHELASTIC_RESTART_COUNT") or 0,
            variables_read=env.variables_read,
        )
