"""Base class of the adapters with torch replicas; imports torch only when a run starts."""

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
from isotrain.adapters.torch.optimizer_state_names import TorchOptimizerStateNames
from isotrain.plugin import (
    Availability,
    BackendConfig,
    DeviceKind,
    Message,
    PipelineSplit,
    ProcessContext,
    StartMethod,
    TcpParameterServer,
)

if TYPE_CHECKING:
    from isotrain.adapters.torch.comm.base import Communicator
    from isotrain.adapters.torch.pipeline.comm import PipelineCommunicator
    from isotrain.plugin import ExportForm, Plan, ReplicaGroup, TrainingSpec

_EXPORTS: frozenset[ExportForm] = frozenset({"keras", "keras-weights", "torch", "onnx"})
INSTALL_HINT = "install PyTorch, and Keras for portable models: pip install torch keras"
_ONLY_CPU = {"CUDA_VISIBLE_DEVICES": "", "KERAS_TORCH_DEVICE": "cpu"}
"""Environment variables of runs on CPUs; Keras would choose any accelerator of torch, such as Intel's."""
_NOT_CAPTURED = {
    "fully-sharded": "with sharded weights are not captured: Keras computes each step eagerly",
    "tensor": "with layers that are cut are not captured: Keras computes each step eagerly, and layers"
    " communicate in it",
}
"""Reasons why steps of portable models are not captured, by parallel layout."""
_FAST_IMPORT = "isotrain.adapters.torch.fast_import"


class TorchAdapter(TcpParameterServer):
    """Adapter of a backend with torch replicas, one per process; a subclass has the communicators."""

    framework = "torch"
    exports = _EXPORTS
    compiler = "torch.compile"
    has_optimizer_groups = True
    has_step_contexts = True
    draws_per_sample = True
    has_per_replica_state = True
    optimizer_state_names = TorchOptimizerStateNames()
    program_hooks: ClassVar[Mapping[str, str]] = {
        "torch": "isotrain.adapters.torch.program_hooks:install"
    }

    @abstractmethod
    def connect(self, backend_config: BackendConfig, context: ProcessContext) -> Communicator:
        """Creates the communicator of a run of several replicas, replicated or sharded. Collective."""

    @abstractmethod
    def connect_pipeline(
        self, backend_config: BackendConfig, context: ProcessContext
    ) -> PipelineCommunicator:
        """Creates the communicator of a pipeline run. Collective."""

    def framework_availability(self) -> Availability:
        """Whether torch is installed; imports nothing. Only portable models need Keras."""
        if importlib.util.find_spec("torch") is None:
            return Availability(False, None, "torch is not installed", INSTALL_HINT)
        return Availability(True, metadata.version("torch"))

    def framework_private_api_changes(self) -> Availability | None:
        """Reason why torch is unavailable: undocumented parts have changed; else None. Imports torch."""
        import torch

        from isotrain.adapters.torch.base import private_api as private
        from isotrain.adapters.torch.comm import powersgd

        return private_api.private_api_changes(
            "torch", torch.__version__, (*private.PROBES, *powersgd.PROBES)
        )

    def check(self, spec: TrainingSpec, options: Mapping[str, Any], *, replicas: int) -> list[str]:
        keras_names.require_known(spec, self.framework)
        return [*_weight_decay_notes(spec), *super().check(spec, options, replicas=replicas)]

    def check_layout(self, spec: TrainingSpec, parallel_layout: str) -> list[str]:
        is_captured = spec.capture and not isinstance(spec.model, Mapping)
        if not is_captured or parallel_layout not in _NOT_CAPTURED:
            return []
        return [f"capture: steps of a portable model {_NOT_CAPTURED[parallel_layout]}"]

    def exchanged_bytes(self, plan: Plan, spec: TrainingSpec) -> float:
        """Bytes of an optimal all-reduce, or of the collectives of a fully sharded run."""
        if plan.parallel_layout == "fully-sharded":
            return fully_sharded_bytes(plan)
        return super().exchanged_bytes(plan, spec)

    def environment_variables(
        self, *, device: DeviceKind, threads: int, replicas: int
    ) -> dict[str, str]:
        variables = {
            keras_backend.ENVIRONMENT_VARIABLE: "torch",
            "OMP_NUM_THREADS": str(threads),
            "MKL_NUM_THREADS": str(threads),
        }
        return variables if device == "gpu" else variables | _ONLY_CPU

    def forked(self, spec: TrainingSpec, device: DeviceKind, *modules: str) -> StartMethod:
        """Start method with a fork server, which imports what replicas need; without one for GPUs.

        A model that is given per framework is a native one, which does not need Keras.

        Args:
            spec: Training spec.
            device: Device of the replicas.
            *modules: Further modules to import.
        """
        if device == "gpu":
            return StartMethod(why_fresh="a process that has initialized a GPU cannot be forked")
        # torch imports its compiler, which takes as long as all the rest, when it builds the first optimizer
        imports = (
            "torch._dynamo",
            __name__,
            "isotrain.adapters.torch.replica.replica_group",
            *modules,
        )
        if isinstance(spec.model, Mapping) or not keras_backend.is_installed():
            return StartMethod((_FAST_IMPORT, "torch", *imports))
        with_keras = (*imports, "isotrain.adapters.torch.trainer.keras")
        return StartMethod((keras_backend.LAZY_IMPORT, _FAST_IMPORT, "torch", "keras", *with_keras))

    def start(
        self, spec: TrainingSpec, backend_config: BackendConfig, context: ProcessContext
    ) -> ReplicaGroup:
        keras_backend.set_backend("torch")
        from isotrain.adapters.torch.base.gpu import replica_device
        from isotrain.adapters.torch.replica.replica_group import TorchReplicaGroup

        device = replica_device(backend_config, context)
        return TorchReplicaGroup(
            spec,
            backend_config,
            device,
            lambda: self._connect(backend_config, context),
            context.role == "worker",
        )

    def _connect(self, backend_config: BackendConfig, context: ProcessContext) -> Communicator:
        """Creates the communicator of a run with one or several replicas. Collective."""
        from isotrain.adapters.torch.comm.base import SingleReplicaCommunicator

        if context.replicas == 1:
            return SingleReplicaCommunicator(*context.local_replicas)
        return self.connect(backend_config, context)

    def recorded_messages(self) -> AbstractContextManager[Sequence[Message]]:
        from isotrain.adapters.torch.comm import recorded_group

        return recorded_group.recorded_messages()

    def without_values(self) -> AbstractContextManager[object]:
        keras_backend.set_backend("torch")
        from isotrain.adapters.torch.base.without_values import WithoutValues

        return WithoutValues()

    def is_missing_value(self, error: BaseException) -> bool:
        from isotrain.adapters.torch.base.without_values import is_missing_value

        return is_missing_value(error)

    def start_updates(
        self, spec: TrainingSpec, backend_config: BackendConfig, context: ProcessContext
    ) -> dict[str, ReplicaGroup]:
        keras_backend.set_backend("torch")
        from isotrain.adapters.torch.base.gpu import replica_device
        from isotrain.adapters.torch.replica.replica_group import start_updates

        return start_updates(
            spec,
            backend_config,
            replica_device(backend_config, context),
            lambda: self._connect(backend_config, context),
        )

    def start_fully_sharded(
        self,
        spec: TrainingSpec,
        backend_config: BackendConfig,
        context: ProcessContext,
        unit_bytes: int,
    ) -> ReplicaGroup:
        keras_backend.set_backend("torch")
        from isotrain.adapters.torch.sharded.replica_group import ShardedReplicaGroup

        return ShardedReplicaGroup(
            spec, backend_config, context, lambda: self.connect(backend_config, context), unit_bytes
        )

    def start_pipeline(
        self,
        spec: TrainingSpec,
        backend_config: BackendConfig,
        context: ProcessContext,
        split: PipelineSplit,
    ) -> ReplicaGroup:
        keras_backend.set_backend("torch")
        from isotrain.adapters.torch.base.gpu import replica_device
        from isotrain.adapters.torch.pipeline.replica_group import PipelineReplicaGroup

        device = replica_device(backend_config, context)
        return PipelineReplicaGroup(
            spec,
            backend_config,
            device,
            lambda: self.connect_pipeline(backend_config, context),
            split,
        )

    def start_tensor_parallel(
        self,
        spec: TrainingSpec,
        backend_config: BackendConfig,
        context: ProcessContext,
        layers: Sequence[str] | Mapping[str, str],
    ) -> ReplicaGroup:
        keras_backend.set_backend("torch")
        from isotrain.adapters.torch.base.gpu import replica_device
        from isotrain.adapters.torch.tensor_parallel.replica_group import TensorParallelReplicaGroup

        device = replica_device(backend_config, context)
        return TensorParallelReplicaGroup(
            spec,
            backend_config,
            device,
            lambda: self.connect_pipeline(backend_config, context),
            layers,
        )


def _weight_decay_notes(spec: TrainingSpec) -> list[str]:
    """Notes that a native torch optimizer applies weight decay differently from Keras'."""
    optimizer = spec.optimizer
    differs = optimizer.decays_weights and not optimizer.decay_is_decoupled
    if not differs or not isinstance(spec.model, Mapping):
        return []
    return [
        f"weight_decay: torch's own {optimizer.name} adds it to the gradient; with Keras"
        " optimizers it is decoupled"
    ]
