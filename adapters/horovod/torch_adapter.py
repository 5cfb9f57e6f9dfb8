"""Declares `horovod-torch`; imports Horovod and torch only when a run starts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from isotrain.adapters.common.layout_capabilities import fully_sharded_bytes
from isotrain.adapters.horovod import build_info
from isotrain.adapters.horovod.base_adapter import FRESH_UNDER_MPI, Horovod
from isotrain.adapters.keras import backend as keras_backend
from isotrain.adapters.torch.adapter import (
    EXPORTS,
    sharded_notes,
    torch_availability,
    torch_environment_variables,
    torch_preload,
    torch_private_api_changes,
    weight_decay_notes,
)
from isotrain.adapters.torch.optimizer_state_names import TorchOptimizerStateNames
from isotrain.plugin import (
    Availability,
    BackendConfig,
    DeviceKind,
    PipelineSplit,
    ProcessContext,
    StartMethod,
)

if TYPE_CHECKING:
    from isotrain.plugin import Plan, ReplicaGroup, TrainingSpec


class HorovodTorch(Horovod):
    """Horovod's DistributedOptimizer under torch replicas."""

    name = "horovod-torch"
    framework = "torch"
    packages = (build_info.DISTRIBUTION, "torch", "keras")
    exports = EXPORTS
    compiler = "torch.compile"
    optimizer_state_names = TorchOptimizerStateNames()
    summary = "Horovod under PyTorch, one process per replica"

    def check(self, spec: TrainingSpec, options: Mapping[str, Any], *, replicas: int) -> list[str]:
        return [*weight_decay_notes(spec), *super().check(spec, options, replicas=replicas)]

    def check_layout(self, spec: TrainingSpec, parallel_layout: str) -> list[str]:
        return sharded_notes(spec) if parallel_layout == "fully-sharded" else []

    def exchanged_bytes(self, plan: Plan, spec: TrainingSpec) -> float:
        """Bytes of Horovod's all-reduce, or of the collectives of a fully sharded run."""
        if plan.parallel_layout == "fully-sharded":
            return fully_sharded_bytes(plan)
        return super().exchanged_bytes(plan, spec)

    def _framework_availability(self) -> Availability:
        return torch_availability()

    def _framework_private_api_changes(self) -> Availability | None:
        return torch_private_api_changes()

    def environment_variables(
        self, *, device: DeviceKind, threads: int, replicas: int
    ) -> dict[str, str]:
        return torch_environment_variables(device, threads)

    def preload(self, spec: TrainingSpec, *, device: DeviceKind) -> StartMethod:
        if self._has_mpi_build():
            return FRESH_UNDER_MPI
        return torch_preload(spec, device, __name__, "isotrain.adapters.horovod.torch_comm")

    def start(
        self, spec: TrainingSpec, backend_config: BackendConfig, context: ProcessContext
    ) -> ReplicaGroup:
        keras_backend.set_backend("torch")
        from isotrain.adapters.torch.comm import base as communicator
        from isotrain.adapters.torch.replica import replica_group as replica_group

        def connect() -> communicator.Communicator:
            if context.replicas == 1:
                return communicator.SingleReplicaCommunicator(*context.local_replicas)
            from isotrain.adapters.horovod.torch_comm import HorovodCommunicator

            return HorovodCommunicator(context, backend_config)

        device = replica_group.replica_device(backend_config, context)
        is_worker = context.role == "worker"
        return replica_group.TorchReplicaGroup(spec, backend_config, device, connect, is_worker)

    def start_fully_sharded(
        self,
        spec: TrainingSpec,
        backend_config: BackendConfig,
        context: ProcessContext,
        unit_bytes: int,
    ) -> ReplicaGroup:
        keras_backend.set_backend("torch")
        from isotrain.adapters.horovod.torch_comm import HorovodCommunicator
        from isotrain.adapters.torch.sharded import replica_group as sharded_group

        def connect() -> HorovodCommunicator:
            return HorovodCommunicator(context, backend_config)

        return sharded_group.ShardedReplicaGroup(spec, backend_config, context, connect, unit_bytes)

    def start_pipeline(
        self,
        spec: TrainingSpec,
        backend_config: BackendConfig,
        context: ProcessContext,
        split: PipelineSplit,
    ) -> ReplicaGroup:
        keras_backend.set_backend("torch")
        from isotrain.adapters.horovod import torch_pipeline_comm
        from isotrain.adapters.torch.pipeline import comm as pipeline_comm
        from isotrain.adapters.torch.pipeline import replica_group as pipeline_group
        from isotrain.adapters.torch.replica import replica_group as replica_group

        def connect() -> pipeline_comm.PipelineCommunicator:
            return torch_pipeline_comm.HorovodPipelineCommunicator(backend_config, context)

        device = replica_group.replica_device(backend_config, context)
        return pipeline_group.PipelineReplicaGroup(spec, backend_config, device, connect, split)
