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
    sharded_notes,
    torch_private_api_changes,
    torch_preload,
    torch_availability,
    torch_environment_variables,
    weight_decay_notes,
)
from isotrain.adapters.torch.slot_forms import TorchOptimizerStateNames
from isotrain.plugin import DeviceKind, PipelineSplit, ProcessContext, BackendConfig, StartMethod, Availability

if TYPE_CHECKING:
    from isotrain.plugin import Plan, ReplicaGroup, TrainingSpec


class HorovodTorch(Horovod):
    """Horovod's DistributedOptimizer under torch replicas."""

    name = "horovod-torch"
    framework = "torch"
    packages = (build.DISTRIBUTION, "torch", "keras")
    exports = EXPORTS
    compiler = "torch.compile"
    optimizer_state_names = TorchOptimizerStateNames()
    summary = "Horovod under PyTorch, one process per replica"

    def check(self, spec: TrainingSpec, options: Mapping[str, Any], *, replicas: int) -> list[str]:
        return [*weight_decay_notes(spec), *super().check(spec, options, replicas=replicas)]

    def check_layout(self, spec: TrainingSpec, parallel_layout: str) -> list[str]:
        return sharded_notes(spec) if parallel_layout == "fully-sharded" else []

    def exchanged_bytes(self, plan: Plan, spec: TrainingSpec) -> float:
        """As any Horovod backend, or what a fully sharded run sends."""
        if plan.parallel_layout == "fully-sharded":
            return fully_sharded_bytes(plan)
        return super().exchanged_bytes(plan, spec)

    def _framework_availability(self) -> Availability:
        return torch_availability()

    def _framework_private_api_changes(self) -> Availability | None:
        return torch_private_api_changes()

    def environment_variables(self, *, device: DeviceKind, threads: int, replicas: int) -> dict[str, str]:
        return torch_environment_variables(device, threads)

    def preload(self, spec: TrainingSpec, *, device: DeviceKind) -> StartMethod:
        if self._with_mpi():
            return FRESH_UNDER_MPI
        return torch_preload(spec, device, __name__, "isotrain.adapters.horovod.torch_exchange")

    def start(self, spec: TrainingSpec, backend_config: BackendConfig, context: ProcessContext) -> ReplicaGroup:
        keras_backend.set_backend("torch")
        from isotrain.adapters.torch import exchange, group

        def connect() -> exchange.Communicator:
            if context.replicas == 1:
                return exchange.SingleReplicaCommunicator(*context.local_replicas)
            from isotrain.adapters.horovod.torch_exchange import HorovodCommunicator

            return HorovodCommunicator(context, backend_config)

        device = group.replica_device(backend_config, context)
        is_worker = context.role == "worker"
        return group.TorchReplicaGroup(spec, backend_config, device, connect, is_worker)

    def start_fully_sharded(
        self, spec: TrainingSpec, backend_config: BackendConfig, context: ProcessContext, unit_bytes: int
    ) -> ReplicaGroup:
        keras_backend.set_backend("torch")
        from isotrain.adapters.horovod.torch_exchange import HorovodCommunicator
        from isotrain.adapters.torch import parted

        def connect() -> HorovodCommunicator:
            return HorovodCommunicator(context, backend_config)

        return parted.ShardedReplicaGroup(spec, backend_config, context, connect, unit_bytes)

    def start_pipeline(
        self, spec: TrainingSpec, backend_config: BackendConfig, context: ProcessContext, cut: PipelineSplit
    ) -> ReplicaGroup:
        keras_backend.set_backend("torch")
        from isotrain.adapters.horovod import torch_stages
        from isotrain.adapters.torch import group, stage_exchange, staged

        def connect() -> stage_exchange.PipelineCommunicator:
            return torch_stages.HorovodPipelineCommunicator(backend_config, context)

        device = group.replica_device(backend_config, context)
        return staged.PipelineReplicaGroup(spec, backend_config, device, connect, cut)
