"""Fits a plan to processes that an engine has started."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from isotrain.core.contracts.adapter import Adapter
from isotrain.core.contracts.allocation import Allocation
from isotrain.core.contracts.layout import Layout, Spot
from isotrain.core.contracts.plan import ProcessPlan
from isotrain.core.contracts.strategy import Strategy
from isotrain.core.errors import PlanError, UnsupportedError
from isotrain.core.planning.ground import Devices, Ground
from isotrain.core.spec.training_spec import TrainingSpec
from isotrain.core.system import hardware


class OnLayout(Ground):
    """One process at each spot of a layout."""

    def __init__(self, layout: Layout, options: Mapping[str, Any] | None = None) -> None:
        """Takes the layout as it is.

        Args:
            layout: Of the processes.
            options: Of the launcher that is going to start them; None: they have been started.
        """
        self.engine = layout.engine
        self.options = options
        self._layout = layout

    def devices(
        self, spec: TrainingSpec, adapter: Adapter, strategy: Strategy, replicas: int | None
    ) -> Devices:
        if self._holds_all(adapter):
            count = needed = replicas or max(1, self._devices_there(spec, adapter))
        else:
            count = replicas_for(
                self._layout.engine, len(self._layout.spots), adapter, strategy, replicas
            )
            needed = self._layout.most_on_a_host
        gpus = self._gpus(spec, adapter, needed)
        remarks = [*self._assumed(spec, gpus, needed), *self._layout.remarks]
        if gpus >= needed:
            return Devices("gpu", count, remarks)
        if spec.device == "gpu":
            raise PlanError(
                f"device: gpu was asked for, which takes {needed} GPUs on a host; a process sees {gpus}."
                " Let each process see all GPUs of its host, start fewer, or use device: cpu."
            )
        if (
            self.options is not None
            and spec.device == "auto"
            and (self._layout.gpus or 0) >= needed
        ):
            remarks = [
                f"{adapter.name!r} can use {gpus} GPUs here, so CPUs are planned; each process that"
                f" {self.engine} starts sees for itself",
                *remarks,
            ]
        elif gpus and self._layout.gpus is not None:
            few = f"{gpus} GPUs on a host that needs {needed} are too few: CPUs are used"
            remarks = [few, *remarks]
        return Devices("cpu", count, remarks)

    def _holds_all(self, adapter: Adapter) -> bool:
        """Whether a single process has all replicas: it will start them itself, as many as it is told."""
        return len(self._layout.spots) == 1 and adapter.replicas_per_process == "all"

    def _devices_there(self, spec: TrainingSpec, adapter: Adapter) -> int:
        if spec.device == "cpu":
            return 0
        return adapter.accelerators() if self._layout.gpus is None else self._layout.gpus

    def _gpus(self, spec: TrainingSpec, adapter: Adapter, needed: int) -> int:
        """That a process can use; those of this machine do not count where others must have some."""
        if spec.device == "cpu":
            return 0
        there = self._layout.gpus
        if spec.device == "gpu" and self.options is not None:
            return needed if there is None else there
        own = adapter.accelerators()
        return own if there is None else min(own, there)

    def _assumed(self, spec: TrainingSpec, gpus: int, needed: int) -> list[str]:
        """What is taken for granted of hosts that cannot be looked at."""
        if self._layout.gpus is not None or spec.device == "cpu":
            return []
        untold = f"{self.engine} does not tell which GPUs its hosts have"
        if gpus < needed:
            return [f"{untold}, so CPUs are planned; each process that it starts sees for itself"]
        if spec.device == "auto":
            return [
                f"{untold}: as many as this machine are planned; each process that it starts sees for itself"
            ]
        return [
            f"{untold}: each is taken to have {needed} or more; one that has fewer ends the run before it"
            " begins"
        ]

    def cores(self, places: int) -> int:
        alone = len(self._layout.spots) == 1
        return max(1, self._layout.cores // places) if alone else self._layout.cores

    def placed(self, processes: Sequence[ProcessPlan]) -> tuple[ProcessPlan, ...]:
        return tuple(
            replace(process, host=spot.host, local_rank=spot.local_rank)
            for process, spot in zip(processes, self._layout.spots, strict=True)
        )


def layout_of(launcher: str, allocation: Allocation) -> Layout:
    """Where an engine will start processes, as far as that is known; its hosts are taken to be like this."""
    spots = [
        Spot(share.host or f"host-{number}", local_rank)
        for number, share in enumerate(allocation.shares)
        for local_rank in range(share.slots)
    ]
    most = max(share.slots for share in allocation.shares)
    return Layout(
        engine=launcher,
        spots=tuple(spots),
        cores=max(1, hardware.cores() // most),
        gpus=allocation.devices,
    )


def replicas_for(
    engine: str, count: int, adapter: Adapter, strategy: Strategy, asked: int | None
) -> int:
    """How many replicas make as many processes as there are.

    Args:
        engine: That has started the processes.
        count: The number of processes.
        adapter: Of the backend.
        strategy: Of the run.
        asked: As many as were asked for, if any were.

    Raises:
        UnsupportedError: The backend declares that it does not join processes.
        PlanError: No number does, or another was asked for.
    """
    reason = adapter.why_not_joined()
    if reason:
        raise UnsupportedError(
            f"{engine} has started {count} processes, and backend {adapter.name!r} does not join"
            f" them to a run: {reason}. `isotrain launchers` lists every pair."
        )
    for replicas in range(count, 0, -1):
        placement = strategy.placement.for_replicas(replicas)
        if len(placement.seats(adapter, replicas)) == count:
            break
    else:
        raise PlanError(
            f"strategy {strategy.name!r}: no number of replicas takes the {count} processes that"
            f" {engine} has started. Start another number of them."
        )
    if asked is not None and asked != replicas:
        raise PlanError(
            f"replicas: {asked} were asked for, and {engine} has started {count} processes, which"
            f" are {replicas} replicas. Leave --replicas out (replicas= in Python), or start as many"
            " processes."
        )
    return replicas
