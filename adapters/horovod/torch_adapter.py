"""Declares `horovod-torch`; imports Horovod and torch only when a run starts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from isotrain.adapters import keras_backend
from isotrain.adapters.declared import fully_sharded_bytes
from isotrain.adapters.horovod import build
from isotrain.adapters.horovod.adapter import FRESH_UNDER_MPI, Horovod
from isotrain.adapters.torch.adapter import (
    EXPORTS,
    parted_remarks,
    torch_changed,
    torch_preload,
    torch_usability,
    torch_variables,
    weight_decay_remarks,
)
from isotrain.adapters.torch.slot_forms import TorchSlotForms
from isotrain.plugin import DeviceKind, ModelCut, ProcessContext, Setting, Start, Usability

if TYPE_CHECKING:
    from isotrain.plugin import Plan, ReplicaGroup, TrainingSpec


class HorovodTorch(Horovod):
    """Horovod's DistributedOptimizer under torch replicas."""

    name = "horovod-torch"
    framework = "torch"
    packages = (build.DISTRIBUTION, "torch", "keras")
    exports = EXPORTS
    compiler = "torch.compile"
    slot_forms = TorchSlotForms()
    summary = "Horovod under PyTorch, one process per replica"

    def check(self, spec: TrainingSpec, options: Mapping[str, Any], *, replicas: int) -> list[str]:
        return [*weight_decay_remarks(spec), *super().check(spec, options, replicas=replicas)]

    def check_placed(self, spec: TrainingSpec, placement: str) -> list[str]:
        return parted_remarks(spec) if placement == "fully-sharded" else []

    def exchanged_bytes(self, plan: Plan, spec: TrainingSpec) -> float:
        """As any Horovod backend, or what a fully sharded run sends."""
        if plan.placement == "fully-sharded":
            return fully_sharded_bytes(plan)
        return super().exchanged_bytes(plan, spec)

    def _framework_usability(self) -> Usability:
        return torch_usability()

    def _framework_changed(self) -> Usability | None:
        return torch_changed()

    def variables(self, *, device: DeviceKind, threads: int, replicas: int) -> dict[str, str]:
        return torch_variables(device, threads)

    def preload(self, spec: TrainingSpec, *, device: DeviceKind) -> Start:
        if self._with_mpi():
            return FRESH_UNDER_MPI
        return torch_preload(spec, device, __name__, "isotrain.adapters.horovod.torch_exchange")

    def start(self, spec: TrainingSpec, setting: Setting, context: ProcessContext) -> ReplicaGroup:
        keras_backend.claim("torch")
        from isotrain.adapters.torch import exchange, group

        def connect() -> exchange.Exchange:
            if context.replicas == 1:
                return exchange.SingleReplica(*context.local_replicas)
            from isotrain.adapters.horovod.torch_exchange import HorovodExchange

            return HorovodExchange(context, setting)

        device = group.replica_device(setting, context)
        is_worker = context.role == "worker"
        return group.TorchReplicaGroup(spec, setting, device, connect, is_worker)

    def start_fully_sharded(
        self, spec: TrainingSpec, setting: Setting, context: ProcessContext, unit_bytes: int
    ) -> ReplicaGroup:
        keras_backend.claim("torch")
        from isotrain.adapters.horovod.torch_exchange import HorovodExchange
        from isotrain.adapters.torch import parted

        def connect() -> HorovodExchange:
            return HorovodExchange(context, setting)

        return parted.PartedGroup(spec, setting, context, connect, unit_bytes)

    def start_staged(
        self, spec: TrainingSpec, setting: Setting, context: ProcessContext, cut: ModelCut
    ) -> ReplicaGroup:
        keras_backend.claim("torch")
        from isotrain.adapters.horovod import torch_stages
        from isotrain.adapters.torch import group, stage_exchange, staged

        def connect() -> stage_exchange.StageExchange:
            return torch_stages.HorovodStageExchange(setting, context)

        device = group.replica_device(setting, context)
        return staged.StagedGroup(spec, setting, device, connect, cut)
