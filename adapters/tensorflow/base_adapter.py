"""Base classes of the adapters with TensorFlow replicas; they import TensorFlow only when a run starts."""

from __future__ import annotations

import importlib.util
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from importlib import metadata
from typing import TYPE_CHECKING, Any, ClassVar

from isotrain.adapters.common import private_api
from isotrain.adapters.common.layout_capabilities import fully_sharded_bytes
from isotrain.adapters.keras import backend as keras_backend
from isotrain.adapters.keras import builtin_names as keras_names
from isotrain.adapters.tensorflow.optimizer_state_names import KerasOptimizerStateNames
from isotrain.plugin import (
    RECORDED,
    Adapter,
    Availability,
    BackendConfig,
    DeviceKind,
    Message,
    PipelineSplit,
    ProcessContext,
    StartMethod,
)

if TYPE_CHECKING:
    from isotrain.adapters.tensorflow.comm.base import Communicator
    from isotrain.adapters.tensorflow.pipeline.comm import PipelineCommunicator
    from isotrain.plugin import ExportForm, Plan, ReplicaGroup, TrainingSpec

_EXPORTS: frozenset[ExportForm] = frozenset({"keras", "keras-weights", "saved-model"})
_INSTALL_HINT = "install TensorFlow: pip install tensorflow"

_DISTRIBUTIONS = ("tensorflow", "tensorflow-cpu", "tensorflow-intel", "tensorflow-rocm")
_LOG_LINES = (
    "WARNING: All log messages before absl",
    "To enable the following instructions",
    r"([0-9: .-]+)?[IW]([0-9]{4} [0-9:. ]+)? ",
)
"""Patterns of messages that TensorFlow logs in every run; see `Adapter.ignored_log_lines`."""
DEFAULT_BUCKET_BYTES = 4 * 2**20


class TensorFlowAdapter(Adapter):
    """Adapter of a backend with TensorFlow replicas."""

    framework = "tensorflow"
    packages: ClassVar[tuple[str, ...]] = (*_DISTRIBUTIONS, "keras")
    ignored_log_lines = _LOG_LINES
    exports = _EXPORTS
    compiler = "XLA"
    has_optimizer_groups = True
    has_step_contexts = True
    draws_per_sample = True
    has_per_replica_state = True
    optimizer_state_names = KerasOptimizerStateNames()
    program_hooks: ClassVar[Mapping[str, str]] = {
        "keras": "isotrain.adapters.tensorflow.program_hooks:install"
    }

    def framework_availability(self) -> Availability:
        """Whether TensorFlow and Keras are installed. Imports neither."""
        for package in ("tensorflow", "keras"):
            if importlib.util.find_spec(package) is None:
                return Availability(False, None, f"{package} is not installed", _INSTALL_HINT)
        version = _installed_version()
        if version is None:
            reason = "a folder named tensorflow can be imported, but no such package is installed"
            return Availability(False, None, reason, _INSTALL_HINT)
        return Availability(True, version)

    def framework_private_api_changes(self) -> Availability | None:
        """Reason why TensorFlow is unavailable: undocumented parts have changed; else None. Imports it."""
        import tensorflow as tf

        from isotrain.adapters.tensorflow.base import private_api as private

        return private_api.private_api_changes("TensorFlow", tf.__version__, private.PROBES)

    def check(self, spec: TrainingSpec, options: Mapping[str, Any], *, replicas: int) -> list[str]:
        keras_names.require_known(spec, self.framework)
        return super().check(spec, options, replicas=replicas)

    def environment_variables(
        self, *, device: DeviceKind, threads: int, replicas: int
    ) -> dict[str, str]:
        variables = {
            keras_backend.ENVIRONMENT_VARIABLE: "tensorflow",
            "TF_NUM_INTRAOP_THREADS": str(threads),
            "TF_NUM_INTEROP_THREADS": str(threads),
            "OMP_NUM_THREADS": str(threads),
            "TF_CPP_MIN_LOG_LEVEL": "1",
        }
        return variables if device == "gpu" else variables | {"CUDA_VISIBLE_DEVICES": "-1"}

    def forked(self, device: DeviceKind, *modules: str) -> StartMethod:
        """Start method with a fork server, which imports what replicas need; without one for GPUs.

        Args:
            device: Device type of the replicas.
            *modules: Further modules to import.
        """
        if device == "gpu":
            return StartMethod(why_fresh="a process that has seen a GPU cannot be forked")
        package = "isotrain.adapters.tensorflow"
        submodules = ("replica.replica_group", "distribution", "comm.tf_distribute")
        adapter_modules = (__name__, *(f"{package}.{each}" for each in submodules), *modules)
        return StartMethod((keras_backend.LAZY_IMPORT, "tensorflow", "keras", *adapter_modules))

    def recorded_messages(self) -> AbstractContextManager[Sequence[Message]]:
        from isotrain.adapters.tensorflow.comm import recorded

        return recorded.recorded_messages()

    def without_values(self) -> AbstractContextManager[object]:
        keras_backend.set_backend("tensorflow")
        from isotrain.adapters.tensorflow.base.without_values import WithoutValues

        return WithoutValues()

    def is_missing_value(self, error: BaseException) -> bool:
        from isotrain.adapters.tensorflow.base.without_values import is_missing_value

        return is_missing_value(error)

    def start_updates(
        self, spec: TrainingSpec, backend_config: BackendConfig, context: ProcessContext
    ) -> dict[str, ReplicaGroup]:
        groups: dict[str, ReplicaGroup] = self.start(spec, backend_config, context).for_updates()  # type: ignore[attr-defined]
        return groups


class MultiProcessAdapter(TensorFlowAdapter):
    """Adapter of a backend with one TensorFlow replica per process, over any communicator."""

    @abstractmethod
    def connect_processes(
        self, spec: TrainingSpec, backend_config: BackendConfig, context: ProcessContext
    ) -> Communicator:
        """Creates the communicator of all processes, for a sharded or pipeline run. Collective."""

    def check_layout(self, spec: TrainingSpec, parallel_layout: str) -> list[str]:
        if parallel_layout != "fully-sharded":
            return []
        return [
            "layers with weights are recomputed in the backward pass, for which their weights are gathered"
            " again"
        ]

    def exchanged_bytes(self, plan: Plan, spec: TrainingSpec) -> float:
        """Bytes of an optimal all-reduce, or of the collectives of a fully sharded run."""
        if plan.parallel_layout == "fully-sharded":
            return fully_sharded_bytes(plan, times=plan.gradient_accumulation_steps)
        return super().exchanged_bytes(plan, spec)

    def start_fully_sharded(
        self,
        spec: TrainingSpec,
        backend_config: BackendConfig,
        context: ProcessContext,
        unit_bytes: int,
    ) -> ReplicaGroup:
        keras_backend.set_backend("tensorflow")
        from isotrain.adapters.tensorflow.sharded.replica_group import ShardedReplicaGroup

        communicator = self.connect_processes(spec, backend_config, context)
        return ShardedReplicaGroup(spec, communicator, context.device_mesh, unit_bytes)

    def start_pipeline(
        self,
        spec: TrainingSpec,
        backend_config: BackendConfig,
        context: ProcessContext,
        split: PipelineSplit,
    ) -> ReplicaGroup:
        keras_backend.set_backend("tensorflow")
        from isotrain.adapters.tensorflow.pipeline.replica_group import PipelineReplicaGroup

        return PipelineReplicaGroup(
            spec, self._connect_within_replicas(spec, backend_config, context), split
        )

    def start_tensor_parallel(
        self,
        spec: TrainingSpec,
        backend_config: BackendConfig,
        context: ProcessContext,
        layers: Sequence[str] | Mapping[str, str],
    ) -> ReplicaGroup:
        keras_backend.set_backend("tensorflow")
        from isotrain.adapters.tensorflow.tensor_parallel.replica_group import (
            TensorParallelReplicaGroup,
        )

        return TensorParallelReplicaGroup(
            spec, self._connect_within_replicas(spec, backend_config, context), layers
        )

    def _connect_within_replicas(
        self, spec: TrainingSpec, backend_config: BackendConfig, context: ProcessContext
    ) -> PipelineCommunicator:
        """Creates the communicator of a run in which processes share a replica. Collective."""
        from isotrain.adapters.tensorflow.pipeline.comm import (
            PipelineCommunicator,
            RecordedPipelineCommunicator,
        )

        processes = self.connect_processes(spec, backend_config, context)
        is_recorded = backend_config.collective == RECORDED
        communicator = RecordedPipelineCommunicator if is_recorded else PipelineCommunicator
        return communicator(processes, context, DEFAULT_BUCKET_BYTES)


def _installed_version() -> str | None:
    for name in _DISTRIBUTIONS:
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return None
