"""The adapters `tf-mirrored` and `tf-multiworker`; they import TensorFlow only when a run starts."""

from __future__ import annotations

import sys
from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar

from isotrain.adapters.common import nccl
from isotrain.adapters.common.layout_capabilities import layout_capabilities
from isotrain.adapters.keras import backend as keras_backend
from isotrain.adapters.tensorflow.base_adapter import (
    DEFAULT_BUCKET_BYTES,
    MultiProcessAdapter,
    TensorFlowAdapter,
)
from isotrain.adapters.tensorflow.build_info import is_cuda_build
from isotrain.plugin import (
    RECORDED,
    REPLICATED_CAPABILITIES,
    Availability,
    BackendConfig,
    Capabilities,
    Capability,
    DeviceKind,
    Examination,
    PlanError,
    ProcessContext,
    StartMethod,
    UnsupportedError,
    visible_gpus,
)

if TYPE_CHECKING:
    import tensorflow as tf

    from isotrain.adapters.tensorflow.base.initial_broadcast import InitialValues
    from isotrain.adapters.tensorflow.comm import base as communicator
    from isotrain.plugin import ReplicaGroup, ServerConnection, TrainingSpec

_BUCKET_OPTION = "bucket_bytes"
_MIRRORED = Capabilities.none("every replica of a MirroredStrategy has a copy of each variable")
_REPLICATED = REPLICATED_CAPABILITIES.with_changes(
    has={Capability.BFLOAT16_COLLECTIVES, Capability.ORDERED_SUMS}
)


class _TFDistribute(TensorFlowAdapter):
    """Adapter of a backend over a `tf.distribute` strategy."""

    replicated_options = frozenset({_BUCKET_OPTION})
    options = {
        _BUCKET_OPTION: "tensors of less than half this many bytes are packed into buckets of this many"
        " before the all-reduce (4194304)",
    }
    sync_batchnorm_devices = frozenset({"cpu", "gpu"})
    cpu_collective: ClassVar[str]

    def availability(self) -> Availability:
        return self.framework_availability()

    def examine(self) -> Examination:
        keras_backend.set_backend("tensorflow")
        import keras
        import tensorflow as tf

        from isotrain.adapters.tensorflow.base import gpu

        versions = {"tensorflow": tf.__version__, "keras": keras.__version__}
        changes = self.framework_private_api_changes() or keras_backend.private_api_changes()
        if changes:
            return Examination(changes, versions=versions)
        collectives = {name: Availability(True) for name in self.collectives}
        collectives["nccl"] = nccl.availability(gpu.count(), instead="auto")
        return Examination(Availability(True, tf.__version__), collectives, versions)

    def accelerators(self) -> int:
        return visible_gpus() if is_cuda_build() else 0

    def resolve_collective(
        self, requested: str | None, *, device: DeviceKind, replicas: int
    ) -> str:
        name = self.collective_or_default(requested)
        return nccl.resolve(self, name, device, on_cpu=self.cpu_collective)

    def check(self, spec: TrainingSpec, options: Mapping[str, Any], *, replicas: int) -> list[str]:
        bucket_bytes(options, self.name)
        return super().check(spec, options, replicas=replicas)

    def preload(self, spec: TrainingSpec, *, device: DeviceKind) -> StartMethod:
        return self.forked(device, __name__)

    def is_peer_error(self, error: BaseException) -> bool:
        if "tensorflow" not in sys.modules:
            return False
        from isotrain.adapters.tensorflow import distribution

        return distribution.is_peer_error(error)

    def start(
        self, spec: TrainingSpec, backend_config: BackendConfig, context: ProcessContext
    ) -> ReplicaGroup:
        keras_backend.set_backend("tensorflow")
        import tensorflow as tf

        from isotrain.adapters.tensorflow import distribution
        from isotrain.adapters.tensorflow.base import gpu
        from isotrain.adapters.tensorflow.comm.base import SingleReplicaCommunicator
        from isotrain.adapters.tensorflow.replica.replica_group import TensorFlowReplicaGroup

        # kernels divide sums by the number of threads
        replicas = 1 if spec.reproducible else len(context.local_replicas)
        distribution.use_threads(backend_config.threads * replicas)
        if context.replicas == 1:
            gpu.use_local_gpu(backend_config, context)
            single = SingleReplicaCommunicator(*context.local_replicas)
            return TensorFlowReplicaGroup(spec, tf.distribute.get_strategy(), single)
        strategy = self.build_strategy(spec, backend_config, context)
        limit = bucket_bytes(backend_config.options, self.name)
        communicator = self.connect(backend_config, context, limit)
        return TensorFlowReplicaGroup(
            spec, strategy, communicator, self.initial_values(strategy, context)
        )

    def initial_values(
        self, strategy: tf.distribute.Strategy, context: ProcessContext
    ) -> InitialValues | None:
        """Creator of the variables instead of the `tf.distribute` strategy; None: the strategy."""
        return None

    @abstractmethod
    def connect(
        self, backend_config: BackendConfig, context: ProcessContext, bucket_bytes: int
    ) -> communicator.Communicator:
        """Builds the communicator of a run with several replicas. Collective."""

    @abstractmethod
    def build_strategy(
        self, spec: TrainingSpec, backend_config: BackendConfig, context: ProcessContext
    ) -> tf.distribute.Strategy:
        """Builds the `tf.distribute` strategy of a run with several replicas. Collective."""


class TFMirrored(_TFDistribute):
    """Backend over `tf.distribute.MirroredStrategy`."""

    name = "tf-mirrored"
    summary = "TensorFlow MirroredStrategy, one process for all replicas of a machine"
    collectives = {
        "auto": "nccl on GPUs, one-device on CPUs",
        "hierarchical-copy": "reduces in two halves and copies back; needs an even number of replicas",
        "one-device": "reduces on one device and copies back",
        "nccl": "NVIDIA's collectives, for GPUs",
    }
    replicas_per_process = "all"
    capabilities = {
        "replicated": _REPLICATED,
        "parameter-server": Capabilities.none(
            "all its replicas live in one process and step together"
        ),
        "sharded": _MIRRORED,
        "fully-sharded": _MIRRORED,
        "tensor": _MIRRORED,
        "pipeline": Capabilities.none(
            "all its replicas live in one process, and each stage needs its own"
        ),
    }
    cpu_collective = "one-device"

    def environment_variables(
        self, *, device: DeviceKind, threads: int, replicas: int
    ) -> dict[str, str]:
        return super().environment_variables(
            device=device, threads=threads * replicas, replicas=replicas
        )

    def resolve_collective(
        self, requested: str | None, *, device: DeviceKind, replicas: int
    ) -> str:
        name = super().resolve_collective(requested, device=device, replicas=replicas)
        if name == "hierarchical-copy" and replicas % 2 == 1 and replicas > 1:
            raise UnsupportedError(
                f"tf-mirrored:hierarchical-copy adds up pairs of replicas, and TensorFlow silently leaves"
                f" out the last of an odd number; this run has {replicas} replicas. Use"
                " tf-mirrored:one-device, or an even number of replicas."
            )
        return name

    def build_strategy(
        self, spec: TrainingSpec, backend_config: BackendConfig, context: ProcessContext
    ) -> tf.distribute.Strategy:
        from isotrain.adapters.tensorflow import distribution

        if backend_config.collective == RECORDED:
            backend_config = replace(backend_config, collective=self.cpu_collective)
        return distribution.mirrored_strategy(backend_config, context)

    def connect(
        self, backend_config: BackendConfig, context: ProcessContext, bucket_bytes: int
    ) -> communicator.Communicator:
        from isotrain.adapters.tensorflow.comm.recorded import RecordedMirroredCommunicator
        from isotrain.adapters.tensorflow.comm.tf_distribute import MirroredCommunicator

        is_recorded = backend_config.collective == RECORDED
        communicator = RecordedMirroredCommunicator if is_recorded else MirroredCommunicator
        return communicator(context.replicas, context.local_replicas, bucket_bytes)


class TFMultiWorker(MultiProcessAdapter, _TFDistribute):
    """Backend over `tf.distribute.MultiWorkerMirroredStrategy`."""

    name = "tf-multiworker"
    summary = "TensorFlow MultiWorkerMirroredStrategy, one process per replica"
    collectives = {
        "auto": "nccl on GPUs, ring on CPUs",
        "ring": "over gRPC, for CPUs and GPUs",
        "nccl": "NVIDIA's collectives, for GPUs",
    }
    capabilities = layout_capabilities(_REPLICATED)
    cpu_collective = "ring"
    parameter_server_transport = "grpc"

    def why_not_elastic(self, requires: frozenset[Capability]) -> str | None:
        return "TensorFlow's runtime cannot change its cluster in a living process"

    def check(self, spec: TrainingSpec, options: Mapping[str, Any], *, replicas: int) -> list[str]:
        notes = super().check(spec, options, replicas=replicas)
        if replicas > 1:
            notes.append(
                "tf-multiworker: TensorFlow's server listens on every network interface, not only on"
                " the configured address; keep its ports behind a firewall."
            )
        return notes

    def servers(self, requested: int) -> int:
        return requested

    def start_parameter_server(
        self, spec: TrainingSpec, backend_config: BackendConfig, server_connection: ServerConnection
    ) -> ReplicaGroup:
        keras_backend.set_backend("tensorflow")
        from isotrain.adapters.tensorflow import parameter_server

        return parameter_server.start_coordinator(spec, backend_config, server_connection)

    def serve(
        self, spec: TrainingSpec, backend_config: BackendConfig, server_connection: ServerConnection
    ) -> None:
        keras_backend.set_backend("tensorflow")
        from isotrain.adapters.tensorflow import parameter_server

        parameter_server.serve(backend_config, server_connection)

    def connect_processes(
        self, spec: TrainingSpec, backend_config: BackendConfig, context: ProcessContext
    ) -> communicator.Communicator:
        from isotrain.adapters.tensorflow import distribution
        from isotrain.adapters.tensorflow.comm.recorded import RecordedProcessCommunicator
        from isotrain.adapters.tensorflow.comm.tf_distribute import ProcessCommunicator

        distribution.use_threads(backend_config.threads)
        self.build_strategy(spec, backend_config, context)  # for its server
        is_recorded = backend_config.collective == RECORDED
        communicator = RecordedProcessCommunicator if is_recorded else ProcessCommunicator
        return communicator(context, backend_config, DEFAULT_BUCKET_BYTES)

    def build_strategy(
        self, spec: TrainingSpec, backend_config: BackendConfig, context: ProcessContext
    ) -> tf.distribute.Strategy:
        import tensorflow as tf

        from isotrain.adapters.tensorflow import distribution

        if backend_config.collective == RECORDED:
            return tf.distribute.get_strategy()
        return distribution.multi_worker_strategy(backend_config, context, spec.timeouts.start)

    def initial_values(
        self, strategy: tf.distribute.Strategy, context: ProcessContext
    ) -> InitialValues | None:
        from isotrain.adapters.tensorflow.base import initial_broadcast

        return initial_broadcast.InitialValues(strategy, context.rank)

    def connect(
        self, backend_config: BackendConfig, context: ProcessContext, bucket_bytes: int
    ) -> communicator.Communicator:
        from isotrain.adapters.tensorflow.comm.recorded import RecordedCommunicator
        from isotrain.adapters.tensorflow.comm.tf_distribute import MultiWorkerCommunicator

        is_recorded = backend_config.collective == RECORDED
        communicator = RecordedCommunicator if is_recorded else MultiWorkerCommunicator
        return communicator(context, backend_config, bucket_bytes)


def bucket_bytes(options: Mapping[str, Any], backend: str) -> int:
    """Bucket size in bytes for the gradient all-reduce, from a backend's options.

    Raises:
        PlanError: The size is not an integer of at least 1.
    """
    size = options.get(_BUCKET_OPTION, DEFAULT_BUCKET_BYTES)
    if not isinstance(size, int) or isinstance(size, bool) or size < 1:
        raise PlanError(
            f"backend_options.{backend}.{_BUCKET_OPTION}: expected an integer number of bytes of at"
            f" least 1, received {size!r}."
        )
    return size
