"""Declares `horovod-tf`; imports Horovod and TensorFlow only when a run starts."""

from __future__ import annotations

from typing import TYPE_CHECKING

from isotrain.adapters import keras_backend
from isotrain.adapters.declared import fully_sharded_bytes
from isotrain.adapters.horovod import build
from isotrain.adapters.horovod.adapter import FRESH_UNDER_MPI, Horovod
from isotrain.adapters.tensorflow.adapter import (
    DEFAULT_BUCKET_BYTES,
    EXPORTS,
    TENSORFLOW_DISTRIBUTIONS,
    TENSORFLOW_LOG_LINES,
    sharded_notes,
    tensorflow_private_api_changes,
    tensorflow_preload,
    tensorflow_availability,
    tensorflow_environment_variables,
)
from isotrain.adapters.tensorflow.slot_forms import KerasOptimizerStateNames
from isotrain.plugin import DeviceKind, PipelineSplit, ProcessContext, BackendConfig, StartMethod, Availability

if TYPE_CHECKING:
    from isotrain.plugin import Plan, ReplicaGroup, TrainingSpec


class HorovodTF(Horovod):
    """Horovod's grouped all-reduce inside TensorFlow's traced training step."""

    name = "horovod-tf"
    framework = "tensorflow"
    packages = (build.DISTRIBUTION, *TENSORFLOW_DISTRIBUTIONS, "keras")
    ignored_log_lines = TENSORFLOW_LOG_LINES
    exports = EXPORTS
    compiler = "XLA"
    optimizer_state_names = KerasOptimizerStateNames()
    summary = "Horovod under TensorFlow, one process per replica"

    def check_layout(self, spec: TrainingSpec, parallel_layout: str) -> list[str]:
        return sharded_notes() if parallel_layout == "fully-sharded" else []

    def exchanged_bytes(self, plan: Plan, spec: TrainingSpec) -> float:
        """As any Horovod backend, or what a fully sharded run sends."""
        if plan.parallel_layout == "fully-sharded":
            return fully_sharded_bytes(plan, times=plan.gradient_accumulation_steps)
        return super().exchanged_bytes(plan, spec)

    def _framework_availability(self) -> Availability:
        return tensorflow_availability()

    def _framework_private_api_changes(self) -> Availability | None:
        return tensorflow_private_api_changes()

    def environment_variables(self, *, device: DeviceKind, threads: int, replicas: int) -> dict[str, str]:
        return tensorflow_environment_variables(device, threads)

    def preload(self, spec: TrainingSpec, *, device: DeviceKind) -> StartMethod:
        if self._with_mpi():
            return FRESH_UNDER_MPI
        return tensorflow_preload(device, __name__, "isotrain.adapters.horovod.tf_exchange")

    def start(self, spec: TrainingSpec, backend_config: BackendConfig, context: ProcessContext) -> ReplicaGroup:
        _use_tensorflow(backend_config, context)
        import tensorflow as tf

        from isotrain.adapters.tensorflow import exchange, group

        if context.replicas == 1:
            alone = exchange.SingleReplicaCommunicator(*context.local_replicas)
            return group.TensorFlowReplicaGroup(spec, tf.distribute.get_strategy(), alone)
        from isotrain.adapters.horovod import runtime, tf_exchange

        parts = runtime.sharding_process_sets(context.device_mesh)
        ties = tf_exchange.HorovodCommunicator(context, backend_config, parts)
        return tf_exchange.HorovodReplicaGroup(spec, ties, backend_config.options)

    def start_fully_sharded(
        self, spec: TrainingSpec, backend_config: BackendConfig, context: ProcessContext, unit_bytes: int
    ) -> ReplicaGroup:
        _use_tensorflow(backend_config, context)
        from isotrain.adapters.horovod import runtime, tf_exchange
        from isotrain.adapters.tensorflow import parted

        parts = runtime.sharding_process_sets(context.device_mesh)
        ties = tf_exchange.HorovodCommunicator(context, backend_config, parts)
        return parted.ShardedReplicaGroup(spec, ties, context.device_mesh, unit_bytes)

    def start_pipeline(
        self, spec: TrainingSpec, backend_config: BackendConfig, context: ProcessContext, cut: PipelineSplit
    ) -> ReplicaGroup:
        _use_tensorflow(backend_config, context)
        from isotrain.adapters.horovod import runtime, tf_exchange
        from isotrain.adapters.tensorflow import stage_exchange, staged

        parts = runtime.pipeline_process_sets(context.device_mesh)
        processes = tf_exchange.HorovodCommunicator(context, backend_config, parts)
        ties = stage_exchange.PipelineCommunicator(processes, context, DEFAULT_BUCKET_BYTES)
        return staged.PipelineReplicaGroup(spec, ties, cut)


def _use_tensorflow(backend_config: BackendConfig, context: ProcessContext) -> None:
    """Has Keras compute with TensorFlow, and TensorFlow with this process's threads and GPU."""
    keras_backend.set_backend("tensorflow")
    from isotrain.adapters.tensorflow import native

    native.use_threads(backend_config.threads)
    native.use_local_gpu(backend_config, context)
