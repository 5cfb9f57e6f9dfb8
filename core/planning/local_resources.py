"""Resources of this machine, for processes that a launcher will start on it."""

from __future__ import annotations

from collections.abc import Sequence

from isotrain.core.contracts.adapter import Adapter
from isotrain.core.contracts.device_mesh import STAGE
from isotrain.core.contracts.launcher import LauncherChoice
from isotrain.core.contracts.plan import ProcessPlan
from isotrain.core.contracts.strategy import Strategy
from isotrain.core.errors import PlanError
from isotrain.core.planning.resources import Devices, Resources
from isotrain.core.spec.training_spec import TrainingSpec
from isotrain.core.system import hardware


class LocalResources(Resources):
    """Resources of this machine for all processes of a run."""

    def __init__(self, launcher: LauncherChoice) -> None:
        self.launcher = launcher.name
        self.options = launcher.options

    def devices(
        self, spec: TrainingSpec, adapter: Adapter, strategy: Strategy, replicas: int | None
    ) -> Devices:
        stages = strategy.parallel_layout.device_mesh(1).size(STAGE)
        gpus = 0 if spec.device == "cpu" else adapter.accelerators()
        count = replicas or max(1, gpus // stages)
        if gpus >= count * stages:
            return Devices("gpu", count)
        if spec.device == "gpu":
            raise PlanError(
                f"device: gpu was requested with {_describe_count(count, stages)}, and {adapter.name!r} can"
                f" use {gpus} GPUs here. Use {'fewer replicas, or ' if count > 1 else ''}device: cpu."
            )
        too_few = f"{gpus} GPUs for {_describe_count(count, stages)} are too few: CPUs are used"
        return Devices("cpu", count, [too_few] if gpus else [])

    def cores(self, count: int) -> int:
        return max(1, hardware.cores() // count)

    def assign_hosts(self, processes: Sequence[ProcessPlan]) -> tuple[ProcessPlan, ...]:
        return tuple(processes)


def _describe_count(replicas: int, stages: int) -> str:
    return f"{replicas} replicas" if stages == 1 else f"{replicas} replicas of {stages} stages"
