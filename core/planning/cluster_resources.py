"""Fits a plan to processes that an engine has started."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from isotrain.core.contracts.adapter import Adapter
from isotrain.core.contracts.cluster_environment import ClusterLayout, ProcessSlot
from isotrain.core.contracts.launcher import Allocation
from isotrain.core.contracts.plan import ProcessPlan
from isotrain.core.contracts.strategy import Strategy
from isotrain.core.errors import PlanError, UnsupportedError
from isotrain.core.planning.resources import Devices, Resources
from isotrain.core.spec.training_spec import TrainingSpec
from isotrain.core.system import hardware


class ClusterResources(Resources):
    """One process at each spot of a layout."""

    def __init__(self, layout: ClusterLayout, options: Mapping[str, Any] | None = None) -> None:
        """Takes the layout as it is.

        Args:
            layout: Of the processes.
            options: Of the launcher that is going to start them; None: they have been started.
        """
        self.launcher = layout.launcher
        self.options = options
        self._layout = layout

    def devices(
        self, spec: TrainingSpec, adapter: Adapter, strategy: Strategy, replicas: int | None
    ) -> Devices:
        if self._holds_all(adapter):
            count = needed = replicas or max(1, self._devices_there(spec, adapter))
        else:
            count = replicas_for(
                self._layout.launcher, len(self._layout.process_slots), adapter, strategy, replicas
            )
            needed = self._layout.max_processes_per_host
        gpus = self._gpus(spec, adapter, needed)
        notes = [*self._assumed(spec, gpus, needed), *self._layout.notes]
        if gpus >= needed:
            return Devices("gpu", count, notes)
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
            notes = [
                f"{adapter.name!r} can use {gpus} GPUs here, so CPUs are planned; each process that"
                f" {self.launcher} starts sees for itself",
                *notes,
            ]
        elif gpus and self._layout.gpus is not None:
            few = f"{gpus} GPUs on a host that needs {needed} are too few: CPUs are used"
            notes = [few, *notes]
        return Devices("cpu", count, notes)

    def _holds_all(self, adapter: Adapter) -> bool:
        """Whether a single process has all replicas: it will start them itself, as many as it is told."""
        return len(self._layout.process_slots) == 1 and adapter.replicas_per_process == "all"

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
        untold = f"{self.launcher} does not tell which GPUs its hosts have"
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
        alone = len(self._layout.process_slots) == 1
        return max(1, self._layout.cores // places) if alone else self._layout.cores

    def assign_hosts(self, processes: Sequence[ProcessPlan]) -> tuple[ProcessPlan, ...]:
        return tuple(
            replace(process, host=spot.host, local_rank=spot.local_rank)
            for process, spot in zip(processes, self._layout.process_slots, strict=True)
        )


def layout_of(launcher: str, allocation: Allocation) -> ClusterLayout:
    """Where an engine will start processes, as far as that is known; its hosts are taken to be like this."""
    process_slots = [
        ProcessSlot(share.host or f"host-{number}", local_rank)
        for number, share in enumerate(allocation.host_slots)
        for local_rank in range(share.slots)
    ]
    most = max(share.slots for share in allocation.host_slots)
    return ClusterLayout(
        launcher=launcher,
        process_slots=tuple(process_slots),
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
    reason = adapter.why_not_externally_started()
    if reason:
        raise UnsupportedError(
            f"{engine} has started {count} processes, and backend {adapter.name!r} does not join"
            f" them to a run: {reason}. `isotrain launchers` lists every pair."
        )
    for replicas in range(count, 0, -1):
        parallel_layout = strategy.parallel_layout.for_replicas(replicas)
        if len(parallel_layout.process_roles(adapter, replicas)) == count:
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
