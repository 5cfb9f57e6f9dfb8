"""Declares `tf-mirrored` and `tf-multiworker`; imports TensorFlow only when a run starts."""

from __future__ import annotations

import importlib.util
import sys
from abc import abstractmethod
from collections.abc import Mapping
from importlib import metadata
from typing import TYPE_CHECKING, Any, ClassVar

from isotrain.adapters import keras_backend, keras_names, private_parts
from isotrain.adapters.declared import FULLY_SHARDED_GROUP, STAGED_GROUP, fully_sharded_bytes
from isotrain.adapters.tensorflow.build import is_cuda_build
from isotrain.adapters.tensorflow.slot_forms import KerasSlotForms
from isotrain.plugin import (
    NOT_REPLICATED,
    SERVED_GROUP,
    Adapter,
    Capabilities,
    Capability,
    DeviceKind,
    Examination,
    ModelCut,
    PlanError,
    ProcessContext,
    Setting,
    Start,
    UnsupportedError,
    Usability,
    sharded_group,
    visible_gpus,
)

if TYPE_CHECKING:
    import tensorflow as tf

    from isotrain.adapters.tensorflow import exchange
    from isotrain.adapters.tensorflow.first_values import FirstValues
    from isotrain.plugin import ExportForm, Plan, ReplicaGroup, Service, TrainingSpec

EXPORTS: frozenset[ExportForm] = frozenset({"keras", "keras-weights", "saved-model"})
INSTALL_HINT = "install TensorFlow: pip install tensorflow"

TENSORFLOW_DISTRIBUTIONS = ("tensorflow", "tensorflow-cpu", "tensorflow-intel", "tensorflow-rocm")
TENSORFLOW_LINES = (
    "WARNING: All log messages before absl",
    "To enable the following instructions",
    r"([0-9: .-]+)?[IW]([0-9]{4} [0-9:. ]+)? ",
)
"""Remarks and warnings that TensorFlow writes whatever it does; see `Adapter.usual_lines`."""
_BUCKET_OPTION = "bucket_bytes"
DEFAULT_BUCKET_BYTES = 4 * 2**20
_MIRRORED = Capabilities.none("a variable of a MirroredStrategy is on every replica alike")
_REPLICATED = Capabilities(
    frozenset(
        {
            Capability.SYNCHRONISED_STEP,
            Capability.LOCAL_STEP,
            Capability.GRADIENTS,
            Capability.APPLY,
            Capability.NAMED_STATE,
            Capability.AVERAGE_PARAMETERS,
            Capability.SEND_RECEIVE,
            Capability.COMPUTE,
            Capability.SUBGROUPS,
            Capability.BFLOAT16_EXCHANGE,
        }
    ),
    NOT_REPLICATED,
)


class _TensorFlowAdapter(Adapter):
    framework = "tensorflow"
    packages = (*TENSORFLOW_DISTRIBUTIONS, "keras")
    usual_lines = TENSORFLOW_LINES
    exports = EXPORTS
    compiler = "XLA"
    slot_forms = KerasSlotForms()
    replicated_options = frozenset({_BUCKET_OPTION})
    options = {
        _BUCKET_OPTION: "tensors of less than half as many bytes are joined into buckets of this many"
        " before they are exchanged (4194304)",
    }
    synchronised_statistics = frozenset({"cpu", "gpu"})
    cpu_collective: ClassVar[str]

    def usability(self) -> Usability:
        return tensorflow_usability()

    def examine(self) -> Examination:
        keras_backend.claim("tensorflow")
        import keras
        import tensorflow as tf

        versions = {"tensorflow": tf.__version__, "keras": keras.__version__}
        fault = tensorflow_changed() or keras_backend.changed()
        if fault:
            return Examination(fault, versions=versions)
        gpus = len(tf.config.list_physical_devices("GPU"))
        collectives = {
            name: nccl_usability(gpus) if name == "nccl" else Usability(True)
            for name in self.collectives
        }
        return Examination(Usability(True, tf.__version__), collectives, versions)

    def accelerators(self) -> int:
        return visible_gpus() if is_cuda_build() else 0

    def resolve_collective(
        self, requested: str | None, *, device: DeviceKind, replicas: int
    ) -> str:
        name = self.known_collective(requested)
        if name == "auto":
            return "nccl" if device == "gpu" else self.cpu_collective
        if name == "nccl" and device == "cpu":
            raise UnsupportedError(
                f"{self.name}:nccl exchanges between GPUs, and this run uses CPUs (TensorFlow itself"
                " would go on with another collective and only warn). Use"
                f" {self.name}:{self.cpu_collective}, or device: gpu on a machine with NVIDIA GPUs"
                " and a CUDA build of TensorFlow."
            )
        return name

    def check(self, spec: TrainingSpec, options: Mapping[str, Any], *, replicas: int) -> list[str]:
        bucket_bytes(options, self.name)
        keras_names.require_known(spec, self.framework)
        return []

    def preload(self, spec: TrainingSpec, *, device: DeviceKind) -> Start:
        return tensorflow_preload(device)

    def blames_peer(self, error: BaseException) -> bool:
        if "tensorflow" not in sys.modules:
            return False
        from isotrain.adapters.tensorflow import peers

        return peers.blames_peer(error)

    def start(self, spec: TrainingSpec, setting: Setting, context: ProcessContext) -> ReplicaGroup:
        keras_backend.claim("tensorflow")
        import tensorflow as tf

        from isotrain.adapters.tensorflow import native
        from isotrain.adapters.tensorflow.exchange import SingleReplica
        from isotrain.adapters.tensorflow.group import TensorFlowReplicaGroup

        native.use_threads(setting.threads * len(context.local_replicas))
        if context.replicas == 1:
            native.use_own_gpu(setting, context)
            alone = SingleReplica(*context.local_replicas)
            return TensorFlowReplicaGroup(spec, tf.distribute.get_strategy(), alone)
        strategy = self.build_strategy(spec, setting, context)
        limit = bucket_bytes(setting.options, self.name)
        ties = self.connect(setting, context, limit)
        return TensorFlowReplicaGroup(spec, strategy, ties, self.first_values(strategy, context))

    def first_values(
        self, strategy: tf.distribute.Strategy, context: ProcessContext
    ) -> FirstValues | None:
        """What makes the variables in the place of the native strategy, if anything does."""
        return None

    @abstractmethod
    def connect(
        self, setting: Setting, context: ProcessContext, bucket_bytes: int
    ) -> exchange.Exchange:
        """Makes the ties between several replicas."""

    @abstractmethod
    def build_strategy(
        self, spec: TrainingSpec, setting: Setting, context: ProcessContext
    ) -> tf.distribute.Strategy:
        """Makes the native strategy of several replicas."""


class TFMirrored(_TensorFlowAdapter):
    """tf.distribute.MirroredStrategy."""

    name = "tf-mirrored"
    summary = "TensorFlow MirroredStrategy, one process for all replicas of a machine"
    collectives = {
        "auto": "nccl on GPUs, one-device on CPUs",
        "hierarchical-copy": "reduces in two halves and copies back; even numbers of replicas",
        "one-device": "reduces on one device and copies back",
        "nccl": "NVIDIA's collectives, for GPUs",
    }
    replicas_per_process = "all"
    capabilities = {
        "replicated": _REPLICATED,
        "served": Capabilities.none("all its replicas live in one process and step together"),
        "sharded": _MIRRORED,
        "fully-sharded": _MIRRORED,
        "staged": Capabilities.none(
            "all its replicas live in one process, and stages need one each"
        ),
    }
    cpu_collective = "one-device"

    def variables(self, *, device: DeviceKind, threads: int, replicas: int) -> dict[str, str]:
        return tensorflow_variables(device, threads * replicas)

    def resolve_collective(
        self, requested: str | None, *, device: DeviceKind, replicas: int
    ) -> str:
        name = super().resolve_collective(requested, device=device, replicas=replicas)
        if name == "hierarchical-copy" and replicas % 2 == 1 and replicas > 1:
            raise UnsupportedError(
                f"tf-mirrored:hierarchical-copy adds up pairs of replicas, and TensorFlow leaves out"
                f" the last of an odd number without a word; this run has {replicas}. Use"
                " tf-mirrored:one-device, or an even number of replicas."
            )
        return name

    def build_strategy(
        self, spec: TrainingSpec, setting: Setting, context: ProcessContext
    ) -> tf.distribute.Strategy:
        from isotrain.adapters.tensorflow import native

        return native.mirrored_strategy(setting, context)

    def connect(
        self, setting: Setting, context: ProcessContext, bucket_bytes: int
    ) -> exchange.Exchange:
        from isotrain.adapters.tensorflow.native_exchange import MirroredExchange

        return MirroredExchange(context.replicas, context.local_replicas, bucket_bytes)


class TFMultiWorker(_TensorFlowAdapter):
    """tf.distribute.MultiWorkerMirroredStrategy."""

    name = "tf-multiworker"
    summary = "TensorFlow MultiWorkerMirroredStrategy, one process per replica"
    collectives = {
        "auto": "nccl on GPUs, ring on CPUs",
        "ring": "over gRPC, for CPUs and GPUs",
        "nccl": "NVIDIA's collectives, for GPUs",
    }
    replicas_per_process = "one"
    capabilities = {
        "replicated": _REPLICATED,
        "served": SERVED_GROUP,
        "sharded": sharded_group(_REPLICATED),
        "staged": STAGED_GROUP,
        "fully-sharded": FULLY_SHARDED_GROUP,
    }
    cpu_collective = "ring"
    served_over = "grpc"

    def check(self, spec: TrainingSpec, options: Mapping[str, Any], *, replicas: int) -> list[str]:
        remarks = super().check(spec, options, replicas=replicas)
        if replicas > 1:
            remarks.append(
                "tf-multiworker: TensorFlow's server listens on every network interface, whatever"
                " address it is given; keep its ports behind a firewall."
            )
        return remarks

    def check_placed(self, spec: TrainingSpec, placement: str) -> list[str]:
        return parted_remarks() if placement == "fully-sharded" else []

    def exchanged_bytes(self, plan: Plan, spec: TrainingSpec) -> float:
        """An optimal all-reduce, or what a fully sharded run sends."""
        if plan.placement == "fully-sharded":
            return fully_sharded_bytes(plan, times=plan.accumulate)
        return super().exchanged_bytes(plan, spec)

    def variables(self, *, device: DeviceKind, threads: int, replicas: int) -> dict[str, str]:
        return tensorflow_variables(device, threads)

    def servers(self, asked: int) -> int:
        return asked

    def start_served(self, spec: TrainingSpec, setting: Setting, service: Service) -> ReplicaGroup:
        keras_backend.claim("tensorflow")
        from isotrain.adapters.tensorflow import served

        return served.start_coordinator(spec, setting, service)

    def serve(self, spec: TrainingSpec, setting: Setting, service: Service) -> None:
        keras_backend.claim("tensorflow")
        from isotrain.adapters.tensorflow import served

        served.serve(setting, service)

    def start_fully_sharded(
        self, spec: TrainingSpec, setting: Setting, context: ProcessContext, unit_bytes: int
    ) -> ReplicaGroup:
        keras_backend.claim("tensorflow")
        from isotrain.adapters.tensorflow import native, native_exchange, parted

        native.use_threads(setting.threads)
        native.multi_worker_strategy(setting, context, spec.timeouts.start)  # for its server
        ties = native_exchange.ProcessExchange(context, setting, DEFAULT_BUCKET_BYTES)
        return parted.PartedGroup(spec, ties, context.mesh, unit_bytes)

    def start_staged(
        self, spec: TrainingSpec, setting: Setting, context: ProcessContext, cut: ModelCut
    ) -> ReplicaGroup:
        keras_backend.claim("tensorflow")
        from isotrain.adapters.tensorflow import native, native_exchange, stage_exchange, staged

        native.use_threads(setting.threads)
        native.multi_worker_strategy(setting, context, spec.timeouts.start)  # for its server
        processes = native_exchange.ProcessExchange(context, setting, DEFAULT_BUCKET_BYTES)
        ties = stage_exchange.StageExchange(processes, context, DEFAULT_BUCKET_BYTES)
        return staged.StagedGroup(spec, ties, cut)

    def build_strategy(
        self, spec: TrainingSpec, setting: Setting, context: ProcessContext
    ) -> tf.distribute.Strategy:
        from isotrain.adapters.tensorflow import native

        return native.multi_worker_strategy(setting, context, spec.timeouts.start)

    def first_values(
        self, strategy: tf.distribute.Strategy, context: ProcessContext
    ) -> FirstValues | None:
        from isotrain.adapters.tensorflow import first_values

        return first_values.FirstValues(strategy, context.rank)

    def connect(
        self, setting: Setting, context: ProcessContext, bucket_bytes: int
    ) -> exchange.Exchange:
        from isotrain.adapters.tensorflow.native_exchange import WorkerExchange

        return WorkerExchange(context, setting, bucket_bytes)


def parted_remarks() -> list[str]:
    """What a plan says of weights in parts on TensorFlow."""
    return [
        "layers with weights are computed again in the backward pass, for which these are joined once more"
    ]


def tensorflow_variables(device: DeviceKind, threads: int) -> dict[str, str]:
    """Variables that every process with TensorFlow replicas starts with.

    Args:
        device: What the replicas run on.
        threads: Compute threads of the whole process.
    """
    variables = {
        keras_backend.VARIABLE: "tensorflow",
        "TF_NUM_INTRAOP_THREADS": str(threads),
        "TF_NUM_INTEROP_THREADS": str(threads),
        "OMP_NUM_THREADS": str(threads),
        "TF_CPP_MIN_LOG_LEVEL": "1",
    }
    return variables if device == "gpu" else variables | {"CUDA_VISIBLE_DEVICES": "-1"}


def tensorflow_preload(device: DeviceKind, *modules: str) -> Start:
    """What a process with TensorFlow replicas imports, `modules` besides; GPUs are left to fresh ones."""
    if device == "gpu":
        return Start(why_fresh="a process that has seen a GPU cannot be forked")
    package = "isotrain.adapters.tensorflow"
    of_package = (f"{package}.group", f"{package}.native", f"{package}.native_exchange")
    own = (__name__, *of_package, *modules)
    return Start((keras_backend.DEFERRED, "tensorflow", "keras", *own))


def tensorflow_changed() -> Usability | None:
    """Which private parts of TensorFlow are no longer as they were, if any; imports TensorFlow."""
    import tensorflow as tf

    from isotrain.adapters.tensorflow import private

    return private_parts.changed("TensorFlow", tf.__version__, private.PARTS)


def tensorflow_usability() -> Usability:
    """Whether TensorFlow and Keras are installed; imports neither."""
    for package in ("tensorflow", "keras"):
        if importlib.util.find_spec(package) is None:
            return Usability(False, None, f"{package} is not installed", INSTALL_HINT)
    version = _installed_version()
    if version is None:
        reason = "a folder named tensorflow can be imported, but no such package is installed"
        return Usability(False, None, reason, INSTALL_HINT)
    return Usability(True, version)


def _installed_version() -> str | None:
    for name in TENSORFLOW_DISTRIBUTIONS:
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return None


def nccl_usability(gpus: int) -> Usability:
    """Whether TensorFlow's NCCL collectives can work with so many visible GPUs."""
    if gpus:
        return Usability(True)
    return Usability(False, None, "TensorFlow sees no NVIDIA GPU", "use auto")


def bucket_bytes(options: Mapping[str, Any], backend: str) -> int:
    """Reads the size of the buckets in which gradients are exchanged from a backend's options.

    Raises:
        PlanError: It is no whole number of at least 1.
    """
    size = options.get(_BUCKET_OPTION, DEFAULT_BUCKET_BYTES)
    if not isinstance(size, int) or isinstance(size, bool) or size < 1:
        raise PlanError(
            f"backend_options.{backend}.{_BUCKET_OPTION}: expected a whole number of bytes of at"
            f" least 1, got {size!r}."
        )
    return size
