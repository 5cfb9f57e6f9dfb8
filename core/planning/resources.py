"""Interface of the resources (devices, cores, hosts) on which a run is planned."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from isotrain.core.contracts.adapter import Adapter
from isotrain.core.contracts.plan import DeviceKind, ProcessPlan
from isotrain.core.contracts.strategy import Strategy
from isotrain.core.spec.training_spec import TrainingSpec


@dataclass(frozen=True)
class Devices:
    """Devices of the replicas of a run.

    Attributes:
        kind: `cpu` or `gpu`.
        replicas: Number of replicas.
        notes: Notes on the choice, for the plan.
    """

    kind: DeviceKind
    replicas: int
    notes: Sequence[str] = ()


class Resources(ABC):
    """Hosts, devices and cores of the processes of a run.

    Attributes:
        launcher: Name of the launcher that starts the processes, or of what has started them.
        options: Options of the launcher; None: the processes were started from outside.
    """

    launcher: str
    options: Mapping[str, Any] | None

    @abstractmethod
    def devices(
        self, spec: TrainingSpec, adapter: Adapter, strategy: Strategy, replicas: int | None
    ) -> Devices:
        """Chooses CPUs or GPUs, and the number of replicas.

        Args:
            spec: Training spec.
            adapter: Adapter of the backend.
            strategy: Strategy of the run.
            replicas: Requested number of replicas; None: as many as there are devices.

        Raises:
            PlanError: The requested devices are not available.
        """

    @abstractmethod
    def cores(self, count: int) -> int:
        """Number of cores for each of the `count` replicas or stages of a run."""

    @abstractmethod
    def assign_hosts(self, processes: Sequence[ProcessPlan]) -> tuple[ProcessPlan, ...]:
        """Sets host and local rank of processes that are planned for one machine."""
