"""Declares `horovod-tf`; imports Horovod and TensorFlow only when a run starts."""

from __future__ import annotations

from typing import TYPE_CHECKING

from isotrain.adapters.common.layout_capabilities import fully_sharded_bytes
from isotrain.adapters.horovod import build_info
from isotrain.adapters.horovod.base_adapter import FRESH_UNDER_MPI, Horovod
from isotrain.adapters.keras import backend as keras_backend
from isotrain.adapters.tensorflow.adapter import (
    DEFAULT_BUCKET_BYTES,
    EXPORTS,
    TENSORFLOW_DISTRIBUTIONS,
    TENSORFLOW_LOG_LINES,
    sharded_notes,
    tensorflow_availability,
    tensorflow_environment_variables,
    tensorflow_preload,
    tensorflow_private_api_changes,
)
from isotrain.adapters.tensorflow.optimizer_state_names import KerasOptimizerStateNames
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


class HorovodTF(Horovod):
    """Horovod's grouped all-reduce inside TensorFlow's traced training step."""

    name = "horovod-tf"
    framework = "tensorflow"
    packages = (build_info.DISTRIBUTION, *TENSORFLOW_DISTRIBUTIONS, "keras")
    ignored_log_lines = TENSORFLOW_LOG_LINES
    exports = EXPORTS
    compiler = "XLA"
    optimizer_state_names = KerasOptimizerStateNames()
    summary = "Horovod under TensorFlow, one process per replica"

    def check_layout(self, spec: TrainingSpec, parallel_layout: str) -> list[str]:
        return sharded_notes() if parallel_layout == "fully-sharded" else []

    def exchanged_bytes(self, plan: Plan, spec: TrainingSpec) -> float:
        """Bytes of Horovod's all-reduce, or of the collectives of a fully sharded run."""
        if plan.parallel_layout == "fully-sharded":
            return fully_sharded_bytes(plan, times=plan.gradient_accumulation_steps)
        return super().exchanged_bytes(plan, spec)

    def _framework_availability(self) -> Availability:
        return tensorflow_availability()

    def _framework_private_api_changes(self) -> Availability | None:
        return tensorflow_private_api_changes()

    def environment_variables(
        self, *, device: DeviceKind, threads: int, replicas: int
    ) -> dict[str, str]:
        return tensorflow_environment_variables(device, threads)

    def preload(self, spec: TrainingSpec, *, device: DeviceKind) -> StartMethod:
        if self._has_mpi_build():
            return FRESH_UNDER_MPI
        return tensorflow_preload(device, __name__, "isotrain.adapters.horovod.tf_comm")

    def start(
        self, spec: TrainingSpec, backend_config: BackendConfig, context: ProcessContext
    ) -> ReplicaGroup:
        _use_tensorflow(backend_config, context)
        import tensorflow as tf

        from isotrain.adapters.tensorflow.comm import base as communicator
        from isotrain.adapters.tensorflow.replica import replica_group as replica_group

        if context.replicas == 1:
            single = communicator.SingleReplicaCommunicator(*context.local_replicas)
            return replica_group.TensorFlowReplicaGroup(spec, tf.distribute.get_strategy(), single)
        from isotrain.adapters.horovod import runtime, tf_comm

        subgroups = runtime.sharding_process_sets(context.device_mesh)
        horovod_communicator = tf_comm.HorovodCommunicator(context, backend_config, subgroups)
        return tf_comm.HorovodReplicaGroup(spec, horovod_communicator, backend_config.options)

    def start_fully_sharded(
        self,
        spec: TrainingSpec,
        backend_config: BackendConfig,
        context: ProcessContext,
        unit_bytes: int,
    ) -> ReplicaGroup:
        _use_tensorflow(backend_config, context)
        from isotrain.adapters.horovod import runtime, tf_comm
        from isotrain.adapters.tensorflow.sharded import replica_group as sharded_group

        subgroups = runtime.sharding_process_sets(context.device_mesh)
        horovod_communicator = tf_comm.HorovodCommunicator(context, backend_config, subgroups)
        return sharded_group.ShardedReplicaGroup(
            spec, horovod_communicator, context.device_mesh, unit_bytes
        )

    def start_pipeline(
        self,
        spec: TrainingSpec,
        backend_config: BackendConfig,
        context: ProcessContext,
        split: PipelineSplit,
    ) -> ReplicaGroup:
        _use_tensorflow(backend_config, context)
        from isotrain.adapters.horovod import runtime, tf_comm
        from isotrain.adapters.tensorflow.pipeline import comm as pipeline_comm
        from isotrain.adapters.tensorflow.pipeline import replica_group as pipeline_group

        subgroups = runtime.pipeline_process_sets(context.device_mesh)
        processes = tf_comm.HorovodCommunicator(context, backend_config, subgroups)
        communicator = pipeline_comm.PipelineCommunicator(processes, context, DEFAULT_BUCKET_BYTES)
        return pipeline_group.PipelineReplicaGroup(spec, communicator, split)


def _use_tensorflow(backend_config: BackendConfig, context: ProcessContext) -> None:
    """Sets Keras' backend to TensorFlow, and TensorFlow's threads and GPU to those of this process."""
    keras_backend.set_backend("tensorflow")
    from isotrain.adapters.tensorflow import distribution

    distribution.use_threads(backend_config.threads)
    distribution.use_local_gpu(backend_config, context)
