"""Resources of processes that a scheduler or an external launcher starts or has started."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from isotrain.core.contracts.backend.adapter import Adapter
from isotrain.core.contracts.cluster_environment import ClusterLayout
from isotrain.core.contracts.launcher import Allocation
from isotrain.core.contracts.process import ProcessInfo
from isotrain.core.contracts.strategy import Strategy
from isotrain.core.errors import PlanError, UnsupportedError
from isotrain.core.planning.resources import Devices, Resources
from isotrain.core.quantities import counted
from isotrain.core.spec.training_spec import TrainingSpec
from isotrain.core.system import hardware


class ClusterResources(Resources):
    """Resources with one process per slot of a cluster layout."""

    def __init__(
        self,
        layout: ClusterLayout,
        options: Mapping[str, Any] | None = None,
        *,
        joins: bool = False,
    ) -> None:
        """Takes the layout as it is.

        Args:
            layout: Hosts and slots of the processes.
            options: Options of the launcher that will start them; None: they are started already.
            joins: Whether the plan is that of a process that joins a run.
        """
        self.joins = joins
        self.launcher = layout.launcher
        self.options = options
        self._layout = layout

    def devices(
        self,
        spec: TrainingSpec,
        adapter: Adapter,
        strategy: Strategy,
        replicas: int | None,
        collective: str | None = None,
    ) -> Devices:
        if self._holds_all_replicas(adapter):
            count = needed = replicas or max(1, self._device_count(spec, adapter))
        else:
            count = replicas_for(
                self._layout.launcher,
                len(self._layout.processes),
                adapter,
                strategy,
                replicas,
                are_started=self.options is None,
            )
            needed = self._layout.max_processes_per_host
        gpus = self._gpus(spec, adapter, needed)
        notes = [*self._unknown_gpu_notes(spec, gpus, needed), *self._layout.notes]
        if gpus >= needed:
            return Devices("gpu", count, notes)
        if spec.device == "gpu":
            raise PlanError(
                f"device: gpu was requested, which takes {counted(needed, 'GPU')} on a host; a process sees"
                f" {gpus} that {adapter.name!r} can use. Let each process see all GPUs of its host, start"
                " fewer, or use device: cpu; `isotrain doctor` on such a host says what it can use."
            )
        if (
            self.options is not None
            and spec.device == "auto"
            and (self._layout.gpus or 0) >= needed
        ):
            notes = [
                f"{adapter.name!r} can use {counted(gpus, 'GPU')} here, so CPUs are planned; each process"
                f" that {self.launcher} starts checks for itself",
                *notes,
            ]
        elif gpus and self._layout.gpus is not None:
            too_few = (
                f"{counted(gpus, 'GPU')} on a host that needs {needed}: too few, so CPUs are used"
            )
            return Devices("cpu", count, notes, [too_few])
        return Devices("cpu", count, notes)

    def _holds_all_replicas(self, adapter: Adapter) -> bool:
        """Whether a single process holds all replicas, whose number then does not follow from the layout."""
        return len(self._layout.processes) == 1 and adapter.replicas_per_process == "all"

    def _device_count(self, spec: TrainingSpec, adapter: Adapter) -> int:
        if spec.device == "cpu":
            return 0
        return adapter.accelerators() if self._layout.gpus is None else self._layout.gpus

    def _gpus(self, spec: TrainingSpec, adapter: Adapter, needed: int) -> int:
        """Number of GPUs that a process can use, on this machine or, if a launcher starts it, there."""
        if spec.device == "cpu":
            return 0
        allocated = self._layout.gpus
        if spec.device == "gpu" and self.options is not None:
            return needed if allocated is None else allocated
        local = adapter.accelerators()
        return local if allocated is None else min(local, allocated)

    def _unknown_gpu_notes(self, spec: TrainingSpec, gpus: int, needed: int) -> list[str]:
        """Notes on what is assumed about the GPUs of hosts that cannot be examined from here."""
        if self._layout.gpus is not None or spec.device == "cpu":
            return []
        unknown_gpus = f"{self.launcher} does not say which GPUs its hosts have"
        if gpus < needed:
            return [
                f"{unknown_gpus}, so CPUs are planned; each process that it starts checks for itself"
            ]
        if spec.device == "auto":
            return [
                f"{unknown_gpus}: as many as on this machine are planned; each process that it starts checks"
                " for itself"
            ]
        return [
            f"{unknown_gpus}: {needed} or more on each are assumed; a host with fewer ends the run before its"
            " first step"
        ]

    def cores(self, count: int) -> int:
        is_alone = len(self._layout.processes) == 1
        return max(1, self._layout.cores // count) if is_alone else self._layout.cores

    def assign_hosts(self, processes: Sequence[ProcessInfo]) -> tuple[ProcessInfo, ...]:
        return tuple(
            replace(process, host=started.host, local_rank=started.local_rank)
            for process, started in zip(processes, self._layout.processes, strict=True)
        )


def layout_of(launcher: str, allocation: Allocation) -> ClusterLayout:
    """The cluster layout of an allocation; its hosts are assumed to have this machine's number of cores."""
    slots = [
        (each.host or f"host-{number}", local_rank)
        for number, each in enumerate(allocation.host_slots)
        for local_rank in range(each.slots)
    ]
    max_slots = max(each.slots for each in allocation.host_slots)
    return ClusterLayout(
        launcher=launcher,
        processes=tuple(ProcessInfo(rank, *slot) for rank, slot in enumerate(slots)),
        cores=max(1, hardware.cores() // max_slots),
        gpus=allocation.devices,
    )


def replicas_for(
    launcher: str,
    count: int,
    adapter: Adapter,
    strategy: Strategy,
    requested: int | None,
    *,
    are_started: bool = True,
) -> int:
    """Number of replicas that takes exactly the processes of a launcher.

    Args:
        launcher: Launcher or scheduler that starts the processes.
        count: Number of processes.
        adapter: Adapter of the backend.
        strategy: Strategy of the run.
        requested: Requested number of replicas; None: any.
        are_started: Whether the processes are started already, from outside.

    Raises:
        UnsupportedError: The backend does not support processes that were started from outside.
        PlanError: No number of replicas fits, or another number was requested.
    """
    started = f"{launcher} {'has started' if are_started else 'starts'} {counted(count, 'process')}"
    reason = adapter.why_not_externally_started()
    if reason:
        raise UnsupportedError(
            f"{started}, and backend {adapter.name!r} does not join"
            f" them into a run: {reason}. `isotrain launchers` lists every pair."
        )
    for replicas in range(count, 0, -1):
        parallel_layout = strategy.parallel_layout.for_replicas(replicas)
        if len(parallel_layout.processes(adapter, replicas)) == count:
            break
    else:
        raise PlanError(
            f"strategy {strategy.name!r}: {started}, which no number of replicas takes: one takes"
            f" {len(parallel_layout.processes(adapter, 1))}. Start another number of processes (a plan's"
            " --hosts and --gpus-per-host), or change the strategy's options."
        )
    if requested is not None and requested != replicas:
        way_out = "start the processes for them" if are_started else "change the launcher's options"
        raise PlanError(
            f"replicas: {requested} were requested, and {started}, for {counted(replicas, 'replica')}."
            f" Leave --replicas out (replicas= in Python), or {way_out}."
        )
    return replicas
