"""Resources (devices, cores, hosts) on which a run is planned: their interface, and those of this machine."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from isotrain.core.contracts.backend.adapter import Adapter
from isotrain.core.contracts.launcher import LauncherChoice
from isotrain.core.contracts.plan import DeviceKind
from isotrain.core.contracts.process import ProcessInfo
from isotrain.core.contracts.strategy import Strategy
from isotrain.core.errors import PlanError
from isotrain.core.quantities import counted
from isotrain.core.spec.training_spec import TrainingSpec
from isotrain.core.system import hardware

_MOST_PER_CORE = 4
"""Processes per core up to which a plan has no warning of them, as for trying out a few replicas."""


@dataclass(frozen=True)
class Devices:
    """Devices of the replicas of a run.

    Attributes:
        kind: `cpu` or `gpu`.
        replicas: Number of replicas.
        notes: Notes on the choice, for the plan.
        warnings: Warnings about the choice, for the plan.
    """

    kind: DeviceKind
    replicas: int
    notes: Sequence[str] = ()
    warnings: Sequence[str] = ()


class Resources(ABC):
    """Hosts, devices and cores of the processes of a run.

    Attributes:
        launcher: Name of the launcher that starts the processes, or of what has started them.
        options: Options of the launcher; None: the processes were started from outside.
        joins: Whether the plan is that of a process that joins a run, which was allowed to be elastic.
    """

    launcher: str
    options: Mapping[str, Any] | None
    joins: bool = False

    @abstractmethod
    def devices(
        self,
        spec: TrainingSpec,
        adapter: Adapter,
        strategy: Strategy,
        replicas: int | None,
        collective: str | None = None,
    ) -> Devices:
        """Chooses CPUs or GPUs, and the number of replicas.

        Args:
            spec: Training spec.
            adapter: Adapter of the backend.
            strategy: Strategy of the run.
            replicas: Requested number of replicas; None: as many as there are devices.
            collective: Requested collective; None: the backend's default.

        Raises:
            PlanError: The requested devices are not available.
        """

    @abstractmethod
    def cores(self, count: int) -> int:
        """Number of cores for each of the `count` replicas or stages of a run."""

    @abstractmethod
    def assign_hosts(self, processes: Sequence[ProcessInfo]) -> tuple[ProcessInfo, ...]:
        """Sets host and local rank of the processes of a parallel layout."""


class LocalResources(Resources):
    """Resources of this machine for all processes of a run."""

    def __init__(self, launcher: LauncherChoice) -> None:
        self.launcher = launcher.name
        self.options = launcher.options

    def devices(
        self,
        spec: TrainingSpec,
        adapter: Adapter,
        strategy: Strategy,
        replicas: int | None,
        collective: str | None = None,
    ) -> Devices:
        processes = strategy.parallel_layout.device_mesh(1).positions_per_replica
        gpus = 0 if spec.device == "cpu" else adapter.accelerators()
        count = replicas or max(1, gpus // processes)
        if gpus >= count * processes:
            return Devices("gpu", count)
        if spec.device == "gpu" and gpus and collective in adapter.gpu_sharing_collectives:
            shared = f"{_describe(count, processes)} share {counted(gpus, 'GPU')}"
            return Devices("gpu", count, [shared])
        if spec.device == "gpu":
            faults = hardware.gpu_faults()
            raise PlanError(
                f"device: gpu was requested with {_describe(count, processes)}, and {adapter.name!r} can"
                f" use {counted(gpus, 'GPU')} here{f' ({faults})' if faults else ''}. Use"
                f" {'fewer replicas, or ' if count > 1 else ''}device: cpu."
            )
        too_few = (
            f"{counted(gpus, 'GPU')} for {_describe(count, processes)}: too few, so CPUs are used"
        )
        started = 1 if adapter.replicas_per_process == "all" else count * processes
        warnings = [*([too_few] if gpus else []), *_crowding_warnings(started)]
        return Devices("cpu", count, warnings=warnings)

    def cores(self, count: int) -> int:
        return max(1, hardware.cores() // count)

    def assign_hosts(self, processes: Sequence[ProcessInfo]) -> tuple[ProcessInfo, ...]:
        return tuple(replace(process, local_rank=process.rank) for process in processes)


def _crowding_warnings(processes: int) -> list[str]:
    """Warning of processes that share the cores of this machine, if they are far more than these."""
    cores = hardware.cores()
    most = _MOST_PER_CORE * cores
    if processes <= most:
        return []
    return [
        f"replicas: {counted(processes, 'process')} share {counted(cores, 'core')} here: they take turns, and"
        f" each takes the memory of a framework. Use at most {most}"
    ]


def _describe(replicas: int, processes: int) -> str:
    described = counted(replicas, "replica")
    return f"{described} of {processes} processes" if processes > 1 else described
