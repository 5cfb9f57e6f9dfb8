"""What a plan asks of where its processes will be."""

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
    """What the replicas of a run compute on.

    Attributes:
        kind: CPUs or GPUs.
        replicas: How many there are.
        notes: What there is to say about it.
    """

    kind: DeviceKind
    replicas: int
    notes: Sequence[str] = ()


class Resources(ABC):
    """Where the processes of a run will be.

    Attributes:
        launcher: What starts them: a launcher, or what has started them with this one.
        options: Of the launcher; None: an engine has started the processes, and they join.
    """

    launcher: str
    options: Mapping[str, Any] | None

    @abstractmethod
    def devices(
        self, spec: TrainingSpec, adapter: Adapter, strategy: Strategy, replicas: int | None
    ) -> Devices:
        """Chooses CPUs or GPUs, and how many replicas.

        Args:
            spec: What to train.
            adapter: Of the backend.
            strategy: Of the run.
            replicas: As many as were asked for, if any were.

        Raises:
            PlanError: What was asked for is not there.
        """

    @abstractmethod
    def cores(self, places: int) -> int:
        """How many cores each of so many places of a run may use."""

    @abstractmethod
    def assign_hosts(self, processes: Sequence[ProcessPlan]) -> tuple[ProcessPlan, ...]:
        """The processes of a plan for one machine where they will be."""
