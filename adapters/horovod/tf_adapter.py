"""Declares `horovod-tf`; imports Horovod and TensorFlow only when a run starts."""

from __future__ import annotations

from typing import TYPE_CHECKING

from isotrain.adapters.horovod import build_info
from isotrain.adapters.horovod.base_adapter import FRESH_UNDER_MPI, Horovod
from isotrain.adapters.keras import backend as keras_backend
from isotrain.adapters.tensorflow.base_adapter import MultiProcessAdapter
from isotrain.plugin import RECORDED, BackendConfig, DeviceKind, ProcessContext, StartMethod

if TYPE_CHECKING:
    from isotrain.adapters.horovod.tf_comm import HorovodCommunicator
    from isotrain.plugin import ReplicaGroup, TrainingSpec


class HorovodTF(MultiProcessAdapter, Horovod):
    """Horovod's grouped all-reduce inside TensorFlow's traced training step."""

    name = "horovod-tf"
    packages = (build_info.DISTRIBUTION, *MultiProcessAdapter.packages)
    summary = "Horovod under TensorFlow, one process per replica"

    def preload(self, spec: TrainingSpec, *, device: DeviceKind) -> StartMethod:
        if self._has_mpi_build():
            return FRESH_UNDER_MPI
        return self.forked(device, __name__, "isotrain.adapters.horovod.tf_comm")

    def connect_processes(
        self, spec: TrainingSpec, backend_config: BackendConfig, context: ProcessContext
    ) -> HorovodCommunicator:
        _use_process_devices(backend_config, context)
        if backend_config.collective == RECORDED:
            from isotrain.adapters.horovod.tf_recorded import RecordedCommunicator

            return RecordedCommunicator(context, backend_config)
        from isotrain.adapters.horovod.tf_comm import HorovodCommunicator

        return HorovodCommunicator(context, backend_config)

    def start(
        self, spec: TrainingSpec, backend_config: BackendConfig, context: ProcessContext
    ) -> ReplicaGroup:
        keras_backend.set_backend("tensorflow")
        if context.replicas > 1:
            communicator = self.connect_processes(spec, backend_config, context)
            from isotrain.adapters.horovod.tf_comm import HorovodReplicaGroup

            return HorovodReplicaGroup(spec, communicator, backend_config.options)
        _use_process_devices(backend_config, context)
        import tensorflow as tf

        from isotrain.adapters.tensorflow.comm.base import SingleReplicaCommunicator
        from isotrain.adapters.tensorflow.replica.replica_group import TensorFlowReplicaGroup

        single = SingleReplicaCommunicator(*context.local_replicas)
        return TensorFlowReplicaGroup(spec, tf.distribute.get_strategy(), single)


def _use_process_devices(backend_config: BackendConfig, context: ProcessContext) -> None:
    """Sets TensorFlow's threads and GPU to those of this process."""
    from isotrain.adapters.tensorflow import distribution
    from isotrain.adapters.tensorflow.base import gpu

    distribution.use_threads(backend_config.threads)
    gpu.use_local_gpu(backend_config, context)
