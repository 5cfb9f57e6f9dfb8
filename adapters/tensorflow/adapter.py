"""The adapters `tf-mirrored` and `tf-multiworker`; they import TensorFlow only when a run starts."""

from __future__ import annotations

import importlib.util
import sys
from abc import abstractmethod
from collections.abc import Mapping
from importlib import metadata
from typing import TYPE_CHECKING, Any, ClassVar

from isotrain.adapters.common import private_api
from isotrain.adapters.common.layout_capabilities import fully_sharded_bytes, layout_capabilities
from isotrain.adapters.keras import backend as keras_backend
from isotrain.adapters.keras import builtin_names as keras_names
from isotrain.adapters.tensorflow.build_info import is_cuda_build
from isotrain.adapters.tensorflow.optimizer_state_names import KerasOptimizerStateNames
from isotrain.plugin import (
    REPLICATED_CAPABILITIES,
    Adapter,
    Availability,
    BackendConfig,
    Capabilities,
    Capability,
    DeviceKind,
    Examination,
    PipelineSplit,
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
    from isotrain.plugin import ExportForm, Plan, ReplicaGroup, ServerConnection, TrainingSpec

EXPORTS: frozenset[ExportForm] = frozenset({"keras", "keras-weights", "saved-model"})
INSTALL_HINT = "install TensorFlow: pip install tensorflow"

TENSORFLOW_DISTRIBUTIONS = ("tensorflow", "tensorflow-cpu", "tensorflow-intel", "tensorflow-rocm")
TENSORFLOW_LOG_LINES = (
    "WARNING: All log messages before absl",
    "To enable the following instructions",
    r"([0-9: .-]+)?[IW]([0-9]{4} [0-9:. ]+)? ",
)
"""Patterns of messages that TensorFlow logs in every run; see `Adapter.ignored_log_lines`."""
_BUCKET_OPTION = "bucket_bytes"
DEFAULT_BUCKET_BYTES = 4 * 2**20
_MIRRORED = Capabilities.none("every replica of a MirroredStrategy has a copy of each variable")
_REPLICATED = REPLICATED_CAPABILITIES.with_changes(has={Capability.BFLOAT16_COLLECTIVES})


class _TensorFlowAdapter(Adapter):
    framework = "tensorflow"
    packages = (*TENSORFLOW_DISTRIBUTIONS, "keras")
    ignored_log_lines = TENSORFLOW_LOG_LINES
    exports = EXPORTS
    compiler = "XLA"
    optimizer_state_names = KerasOptimizerStateNames()
    replicated_options = frozenset({_BUCKET_OPTION})
    options = {
        _BUCKET_OPTION: "tensors of less than half this many bytes are packed into buckets of this many"
        " before the all-reduce (4194304)",
    }
    sync_batchnorm_devices = frozenset({"cpu", "gpu"})
    cpu_collective: ClassVar[str]

    def availability(self) -> Availability:
        return tensorflow_availability()

    def examine(self) -> Examination:
        keras_backend.set_backend("tensorflow")
        import keras
        import tensorflow as tf

        versions = {"tensorflow": tf.__version__, "keras": keras.__version__}
        changes = tensorflow_private_api_changes() or keras_backend.private_api_changes()
        if changes:
            return Examination(changes, versions=versions)
        gpus = len(tf.config.list_physical_devices("GPU"))
        collectives = {
            name: nccl_availability(gpus) if name == "nccl" else Availability(True)
            for name in self.collectives
        }
        return Examination(Availability(True, tf.__version__), collectives, versions)

    def accelerators(self) -> int:
        return visible_gpus() if is_cuda_build() else 0

    def resolve_collective(
        self, requested: str | None, *, device: DeviceKind, replicas: int
    ) -> str:
        name = self.collective_or_default(requested)
        if name == "auto":
            return "nccl" if device == "gpu" else self.cpu_collective
        if name == "nccl" and device == "cpu":
            raise UnsupportedError(
                f"{self.name}:nccl communicates between GPUs, and this run uses CPUs (TensorFlow itself"
                " would fall back to another collective with only a warning). Use"
                f" {self.name}:{self.cpu_collective}, or device: gpu on a machine with NVIDIA GPUs"
                " and a CUDA build of TensorFlow."
            )
        return name

    def check(self, spec: TrainingSpec, options: Mapping[str, Any], *, replicas: int) -> list[str]:
        bucket_bytes(options, self.name)
        keras_names.require_known(spec, self.framework)
        return []

    def preload(self, spec: TrainingSpec, *, device: DeviceKind) -> StartMethod:
        return tensorflow_preload(device)

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
        from isotrain.adapters.tensorflow.comm.base import SingleReplicaCommunicator
        from isotrain.adapters.tensorflow.replica.replica_group import TensorFlowReplicaGroup

        distribution.use_threads(backend_config.threads * len(context.local_replicas))
        if context.replicas == 1:
            distribution.use_local_gpu(backend_config, context)
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


class TFMirrored(_TensorFlowAdapter):
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
        "pipeline": Capabilities.none(
            "all its replicas live in one process, and each stage needs its own"
        ),
    }
    cpu_collective = "one-device"

    def environment_variables(
        self, *, device: DeviceKind, threads: int, replicas: int
    ) -> dict[str, str]:
        return tensorflow_environment_variables(device, threads * replicas)

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

        return distribution.mirrored_strategy(backend_config, context)

    def connect(
        self, backend_config: BackendConfig, context: ProcessContext, bucket_bytes: int
    ) -> communicator.Communicator:
        from isotrain.adapters.tensorflow.comm.tf_distribute import MirroredCommunicator

        return MirroredCommunicator(context.replicas, context.local_replicas, bucket_bytes)


class TFMultiWorker(_TensorFlowAdapter):
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

    def check(self, spec: TrainingSpec, options: Mapping[str, Any], *, replicas: int) -> list[str]:
        notes = super().check(spec, options, replicas=replicas)
        if replicas > 1:
            notes.append(
                "tf-multiworker: TensorFlow's server listens on every network interface, not only on"
                " the configured address; keep its ports behind a firewall."
            )
        return notes

    def check_layout(self, spec: TrainingSpec, parallel_layout: str) -> list[str]:
        return sharded_notes() if parallel_layout == "fully-sharded" else []

    def exchanged_bytes(self, plan: Plan, spec: TrainingSpec) -> float:
        """Bytes that a replica sends per step, by a ring all-reduce or the fully sharded collectives."""
        if plan.parallel_layout == "fully-sharded":
            return fully_sharded_bytes(plan, times=plan.gradient_accumulation_steps)
        return super().exchanged_bytes(plan, spec)

    def environment_variables(
        self, *, device: DeviceKind, threads: int, replicas: int
    ) -> dict[str, str]:
        return tensorflow_environment_variables(device, threads)

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

    def start_fully_sharded(
        self,
        spec: TrainingSpec,
        backend_config: BackendConfig,
        context: ProcessContext,
        unit_bytes: int,
    ) -> ReplicaGroup:
        keras_backend.set_backend("tensorflow")
        from isotrain.adapters.tensorflow import distribution
        from isotrain.adapters.tensorflow.comm import tf_distribute
        from isotrain.adapters.tensorflow.sharded import replica_group as sharded

        distribution.use_threads(backend_config.threads)
        distribution.multi_worker_strategy(
            backend_config, context, spec.timeouts.start
        )  # for its server
        communicator = tf_distribute.ProcessCommunicator(
            context, backend_config, DEFAULT_BUCKET_BYTES
        )
        return sharded.ShardedReplicaGroup(spec, communicator, context.device_mesh, unit_bytes)

    def start_pipeline(
        self,
        spec: TrainingSpec,
        backend_config: BackendConfig,
        context: ProcessContext,
        split: PipelineSplit,
    ) -> ReplicaGroup:
        keras_backend.set_backend("tensorflow")
        from isotrain.adapters.tensorflow import distribution
        from isotrain.adapters.tensorflow.comm import tf_distribute
        from isotrain.adapters.tensorflow.pipeline import comm as pipeline_comm
        from isotrain.adapters.tensorflow.pipeline import replica_group as pipeline_group

        distribution.use_threads(backend_config.threads)
        distribution.multi_worker_strategy(
            backend_config, context, spec.timeouts.start
        )  # for its server
        processes = tf_distribute.ProcessCommunicator(context, backend_config, DEFAULT_BUCKET_BYTES)
        communicator = pipeline_comm.PipelineCommunicator(processes, context, DEFAULT_BUCKET_BYTES)
        return pipeline_group.PipelineReplicaGroup(spec, communicator, split)

    def build_strategy(
        self, spec: TrainingSpec, backend_config: BackendConfig, context: ProcessContext
    ) -> tf.distribute.Strategy:
        from isotrain.adapters.tensorflow import distribution

        return distribution.multi_worker_strategy(backend_config, context, spec.timeouts.start)

    def initial_values(
        self, strategy: tf.distribute.Strategy, context: ProcessContext
    ) -> InitialValues | None:
        from isotrain.adapters.tensorflow.base import initial_broadcast

        return initial_broadcast.InitialValues(strategy, context.rank)

    def connect(
        self, backend_config: BackendConfig, context: ProcessContext, bucket_bytes: int
    ) -> communicator.Communicator:
        from isotrain.adapters.tensorflow.comm.tf_distribute import MultiWorkerCommunicator

        return MultiWorkerCommunicator(context, backend_config, bucket_bytes)


def sharded_notes() -> list[str]:
    """Plan notes on fully sharded runs on TensorFlow."""
    return [
        "layers with weights are recomputed in the backward pass, for which their weights are gathered again"
    ]


def tensorflow_environment_variables(device: DeviceKind, threads: int) -> dict[str, str]:
    """Environment variables of every process with TensorFlow replicas.

    Args:
        device: Device type of the replicas.
        threads: Compute threads of the whole process.
    """
    variables = {
        keras_backend.ENVIRONMENT_VARIABLE: "tensorflow",
        "TF_NUM_INTRAOP_THREADS": str(threads),
        "TF_NUM_INTEROP_THREADS": str(threads),
        "OMP_NUM_THREADS": str(threads),
        "TF_CPP_MIN_LOG_LEVEL": "1",
    }
    return variables if device == "gpu" else variables | {"CUDA_VISIBLE_DEVICES": "-1"}


def tensorflow_preload(device: DeviceKind, *modules: str) -> StartMethod:
    """Start method of processes with TensorFlow replicas: forked with modules imported; fresh for GPUs.

    Args:
        device: Device type of the replicas.
        modules: Modules to import besides those of this package.
    """
    if device == "gpu":
        return StartMethod(why_fresh="a process that has seen a GPU cannot be forked")
    package = "isotrain.adapters.tensorflow"
    submodules = ("replica.replica_group", "distribution", "comm.tf_distribute")
    adapter_modules = (__name__, *(f"{package}.{each}" for each in submodules), *modules)
    return StartMethod((keras_backend.LAZY_IMPORT, "tensorflow", "keras", *adapter_modules))


def tensorflow_private_api_changes() -> Availability | None:
    """Names the private APIs of TensorFlow that have changed; None: none has. Imports TensorFlow."""
    import tensorflow as tf

    from isotrain.adapters.tensorflow.base import private_api as private

    return private_api.private_api_changes("TensorFlow", tf.__version__, private.PROBES)


def tensorflow_availability() -> Availability:
    """Whether TensorFlow and Keras are installed. Imports neither."""
    for package in ("tensorflow", "keras"):
        if importlib.util.find_spec(package) is None:
            return Availability(False, None, f"{package} is not installed", INSTALL_HINT)
    version = _installed_version()
    if version is None:
        reason = "a folder named tensorflow can be imported, but no such package is installed"
        return Availability(False, None, reason, INSTALL_HINT)
    return Availability(True, version)


def _installed_version() -> str | None:
    for name in TENSORFLOW_DISTRIBUTIONS:
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return None


def nccl_availability(gpus: int) -> Availability:
    """Whether TensorFlow's NCCL collectives can work with this number of visible GPUs."""
    if gpus:
        return Availability(True)
    return Availability(False, None, "TensorFlow sees no NVIDIA GPU", "use auto")


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
