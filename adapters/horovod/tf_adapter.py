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
    TENSORFLOW_LINES,
    parted_remarks,
    tensorflow_changed,
    tensorflow_preload,
    tensorflow_usability,
    tensorflow_variables,
)
from isotrain.adapters.tensorflow.slot_forms import KerasSlotForms
from isotrain.plugin import DeviceKind, ModelCut, ProcessContext, Setting, Start, Usability

if TYPE_CHECKING:
    from isotrain.plugin import Plan, ReplicaGroup, TrainingSpec


class HorovodTF(Horovod):
    """Horovod's grouped all-reduce inside TensorFlow's traced training step."""

    name = "horovod-tf"
    framework = "tensorflow"
    packages = (build.DISTRIBUTION, *TENSORFLOW_DISTRIBUTIONS, "keras")
    usual_lines = TENSORFLOW_LINES
    exports = EXPORTS
    compiler = "XLA"
    slot_forms = KerasSlotForms()
    summary = "Horovod under TensorFlow, one process per replica"

    def check_placed(self, spec: TrainingSpec, placement: str) -> list[str]:
        return parted_remarks() if placement == "fully-sharded" else []

    def exchanged_bytes(self, plan: Plan, spec: TrainingSpec) -> float:
        """As any Horovod backend, or what a fully sharded run sends."""
        if plan.placement == "fully-sharded":
            return fully_sharded_bytes(plan, times=plan.accumulate)
        return super().exchanged_bytes(plan, spec)

    def _framework_usability(self) -> Usability:
        return tensorflow_usability()

    def _framework_changed(self) -> Usability | None:
        return tensorflow_changed()

    def variables(self, *, device: DeviceKind, threads: int, replicas: int) -> dict[str, str]:
        return tensorflow_variables(device, threads)

    def preload(self, spec: TrainingSpec, *, device: DeviceKind) -> Start:
        if self._with_mpi():
            return FRESH_UNDER_MPI
        return tensorflow_preload(device, __name__, "isotrain.adapters.horovod.tf_exchange")

    def start(self, spec: TrainingSpec, setting: Setting, context: ProcessContext) -> ReplicaGroup:
        _use_tensorflow(setting, context)
        import tensorflow as tf

        from isotrain.adapters.tensorflow import exchange, group

        if context.replicas == 1:
            alone = exchange.SingleReplica(*context.local_replicas)
            return group.TensorFlowReplicaGroup(spec, tf.distribute.get_strategy(), alone)
        from isotrain.adapters.horovod import runtime, tf_exchange

        parts = runtime.sharing_parts(context.mesh)
        ties = tf_exchange.HorovodExchange(context, setting, parts)
        return tf_exchange.HorovodReplicaGroup(spec, ties, setting.options)

    def start_fully_sharded(
        self, spec: TrainingSpec, setting: Setting, context: ProcessContext, unit_bytes: int
    ) -> ReplicaGroup:
        _use_tensorflow(setting, context)
        from isotrain.adapters.horovod import runtime, tf_exchange
        from isotrain.adapters.tensorflow import parted

        parts = runtime.sharing_parts(context.mesh)
        ties = tf_exchange.HorovodExchange(context, setting, parts)
        return parted.PartedGroup(spec, ties, context.mesh, unit_bytes)

    def start_staged(
        self, spec: TrainingSpec, setting: Setting, context: ProcessContext, cut: ModelCut
    ) -> ReplicaGroup:
        _use_tensorflow(setting, context)
        from isotrain.adapters.horovod import runtime, tf_exchange
        from isotrain.adapters.tensorflow import stage_exchange, staged

        parts = runtime.exchanging_parts(context.mesh)
        processes = tf_exchange.HorovodExchange(context, setting, parts)
        ties = stage_exchange.StageExchange(processes, context, DEFAULT_BUCKET_BYTES)
        return staged.StagedGroup(spec, ties, cut)


def _use_tensorflow(setting: Setting, context: ProcessContext) -> None:
    """Has Keras compute with TensorFlow, and TensorFlow with this process's threads and GPU."""
    keras_backend.claim("tensorflow")
    from isotrain.adapters.tensorflow import native

    native.use_threads(setting.threads)
    native.use_own_gpu(setting, context)
