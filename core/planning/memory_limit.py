"""Memory that the training state of a run must fit into."""

from __future__ import annotations

import math
from dataclasses import dataclass

from isotrain.core.contracts.device_mesh import DeviceMesh
from isotrain.core.contracts.plan import Plan
from isotrain.core.contracts.state import ModelBytes
from isotrain.core.contracts.strategy import Strategy
from isotrain.core.quantities import counted
from isotrain.core.system import hardware


@dataclass(frozen=True)
class MemoryLimit:
    """Memory that the training state of a plan must fit into: this machine's, or that of each GPU.

    Attributes:
        plan: Plan of the run.
        model: Size of the model's state in bytes.
        limit_bytes: Available memory in bytes.
        owner: Words for what has this memory of the CPU, or limits it.
    """

    plan: Plan
    model: ModelBytes
    limit_bytes: int
    owner: str = "this machine has"

    @classmethod
    def of(cls, plan: Plan, model: ModelBytes) -> MemoryLimit | None:
        """The memory limit of a plan for this machine; None if the memory of its GPUs is unknown."""
        if plan.device == "cpu":
            limit = hardware.memory_limit()
            owner = (
                "this machine has" if limit is None else f"the control group ({limit.file}) allows"
            )
            return cls(plan, model, hardware.memory_bytes(), owner)
        gpu_bytes = hardware.gpu_memory_bytes()
        return None if gpu_bytes is None else cls(plan, model, gpu_bytes)

    def excess(self, strategy: Strategy) -> str | None:
        """Clause that says that the state needs more memory than there is; None if it fits."""
        needed = self._bytes_needed(strategy)
        if needed <= self.limit_bytes:
            return None
        gibs, most = f"{needed / 2**30:.3g} GiB", f"{self.limit_bytes / 2**30:.3g}"
        if self.plan.device == "gpu":
            return f"each GPU would have to hold {gibs}, and has {most}"
        return f"{replicas_text(self.plan)} take {gibs}, and {self.owner} {most}"

    def _bytes_needed(self, strategy: Strategy) -> int:
        """Bytes of state on one GPU, or on CPUs of all processes of the host that has most."""
        per_process = strategy.state_bytes(self.model, self.plan.replicas).total
        if self.plan.device == "gpu":
            return per_process
        most = max(map(len, self.plan.hosts)) / self.plan.replicas
        return per_process * math.ceil(self.mesh(strategy).total_size * most)

    def mesh(self, strategy: Strategy) -> DeviceMesh:
        """Device mesh of the plan's replicas and hosts under a strategy."""
        return strategy.parallel_layout.for_replicas(self.plan.replicas).device_mesh_on_hosts(
            self.plan.replicas, self.plan.hosts
        )


def replicas_text(plan: Plan) -> str:
    """The number of replicas, or of processes and replicas, as text."""
    if plan.device_mesh.total_size == plan.replicas:
        return counted(plan.replicas, "replica")
    return f"{plan.device_mesh.total_size} processes of {plan.replicas} replicas"
