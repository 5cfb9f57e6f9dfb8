"""Declares `torch-ddp`; imports torch only when a run starts."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from isotrain.adapters.common import private_api
from isotrain.adapters.common.layout_capabilities import fully_sharded_bytes, layout_capabilities
from isotrain.adapters.keras import backend as keras_backend
from isotrain.adapters.keras import builtin_names as keras_names
from isotrain.adapters.torch.optimizer_state_names import TorchOptimizerStateNames
from isotrain.plugin import (
    REPLICATED_CAPABILITIES,
    Availability,
    BackendConfig,
    Capability,
    DeviceKind,
    Examination,
    PipelineSplit,
    PlanError,
    ProcessContext,
    StartMethod,
    TcpParameterServer,
    UnsupportedError,
    visible_gpus,
)

if TYPE_CHECKING:
    from isotrain.plugin import ExportForm, Plan, ReplicaGroup, TrainingSpec

EXPORTS: frozenset[ExportForm] = frozenset({"keras", "keras-weights", "torch", "onnx"})
INSTALL_HINT = "install PyTorch, and Keras for portable models: pip install torch keras"
_FAST_IMPORT = "isotrain.adapters.torch.fast_import"
_REPLICATED = REPLICATED_CAPABILITIES.with_changes(has={Capability.BFLOAT16_COLLECTIVES})


class TorchDDP(TcpParameterServer):
    """torch.nn.parallel.DistributedDataParallel over torch.distributed."""

    name = "torch-ddp"
    framework = "torch"
    summary = "PyTorch DistributedDataParallel, one process per replica"
    collectives = {
        "auto": "nccl on GPUs, gloo on CPUs",
        "gloo": "over TCP, for CPUs; works for GPUs, slowly",
        "nccl": "NVIDIA's collectives, for GPUs",
        "mpi": "where torch itself was built with MPI",
    }
    sync_batchnorm_devices = frozenset({"gpu"})  # torch.nn.SyncBatchNorm refuses tensors of CPUs
    packages = ("torch", "keras")
    exports = EXPORTS
    compiler = "torch.compile"
    optimizer_state_names = TorchOptimizerStateNames()
    capabilities = layout_capabilities(_REPLICATED)
    replicated_options = frozenset(
        {"bucket_cap_mb", "find_unused_parameters", "gradient_as_bucket_view", "static_graph"}
    )
    options = {
        "bucket_cap_mb": "size of the buckets in which gradients are all-reduced, MiB",
        "find_unused_parameters": "for models whose steps do not all use all parameters (off)",
        "gradient_as_bucket_view": "gradients are views of the buckets: saves memory (on)",
        "static_graph": "promise that every step uses the same parameters (off)",
    }

    def availability(self) -> Availability:
        return torch_availability()

    def examine(self) -> Examination:
        keras_backend.set_backend("torch")
        import torch
        import torch.distributed as dist

        versions = {"torch": torch.__version__, **keras_backend.version()}
        if not dist.is_available():
            reason = "this build of torch has no torch.distributed"
            return Examination(Availability(False, torch.__version__, reason, INSTALL_HINT))
        fault = torch_private_api_changes() or keras_backend.private_api_changes()
        if fault:
            return Examination(fault, versions=versions)
        gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
        collectives = {
            "gloo": _built(dist.is_gloo_available(), "gloo"),
            "nccl": _nccl(dist.is_nccl_available(), gpus),
            "mpi": Availability(False, None, "its processes must be started by mpirun", "use gloo"),
        }
        auto = "nccl" if gpus else "gloo"
        return Examination(
            Availability(True, torch.__version__),
            {"auto": collectives[auto], **collectives},
            versions,
        )

    def check(self, spec: TrainingSpec, options: Mapping[str, Any], *, replicas: int) -> list[str]:
        _check_values(options, self.name)
        keras_names.require_known(spec, self.framework)
        return weight_decay_notes(spec)

    def check_layout(self, spec: TrainingSpec, parallel_layout: str) -> list[str]:
        return sharded_notes(spec) if parallel_layout == "fully-sharded" else []

    def accelerators(self) -> int:
        return visible_gpus() if _is_cuda_build() else 0

    def resolve_collective(
        self, requested: str | None, *, device: DeviceKind, replicas: int
    ) -> str:
        name = self.collective_or_default(requested)
        if name == "auto":
            return "nccl" if device == "gpu" else "gloo"
        if name == "nccl" and device == "cpu":
            raise UnsupportedError(
                "torch-ddp:nccl communicates between GPUs, and this run uses CPUs. Use torch-ddp:gloo,"
                " or device: gpu on a machine with NVIDIA GPUs and a CUDA build of torch."
            )
        if name == "mpi":
            raise UnsupportedError(
                "torch-ddp:mpi needs a torch that was compiled with MPI and processes started by"
                " mpirun; torch's published builds have no MPI. Use torch-ddp:gloo."
            )
        return name

    def environment_variables(
        self, *, device: DeviceKind, threads: int, replicas: int
    ) -> dict[str, str]:
        return torch_environment_variables(device, threads)

    def preload(self, spec: TrainingSpec, *, device: DeviceKind) -> StartMethod:
        return torch_preload(spec, device, "isotrain.adapters.torch.comm.ddp")

    def exchanged_bytes(self, plan: Plan, spec: TrainingSpec) -> float:
        """Bytes of an optimal all-reduce, or of the all-gathers and reduce-scatters of a fully sharded run.

        For native models torch's FSDP reduce-scatters: on Gloo that moves as much as an all-reduce.
        """
        if plan.parallel_layout != "fully-sharded":
            return super().exchanged_bytes(plan, spec)
        sums_natively = isinstance(spec.model, Mapping) and plan.collective == "gloo"
        return fully_sharded_bytes(plan, sums=2 if sums_natively else 1)

    def is_peer_error(self, error: BaseException) -> bool:
        return is_torch_peer_error(error)

    def start(
        self, spec: TrainingSpec, backend_config: BackendConfig, context: ProcessContext
    ) -> ReplicaGroup:
        keras_backend.set_backend("torch")
        from isotrain.adapters.torch.comm import base as communicator
        from isotrain.adapters.torch.comm import ddp
        from isotrain.adapters.torch.replica import replica_group as replica_group

        def connect() -> communicator.Communicator:
            if context.replicas == 1:
                return communicator.SingleReplicaCommunicator(*context.local_replicas)
            return ddp.DDPCommunicator(backend_config, context)

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
        if not isinstance(spec.model, Mapping):
            return self._start_sharded(spec, backend_config, context, unit_bytes)
        from isotrain.adapters.torch.replica import replica_group as replica_group
        from isotrain.adapters.torch.sharded import fsdp

        def connect() -> fsdp.FSDPCommunicator:
            return fsdp.FSDPCommunicator(backend_config, context, unit_bytes)

        device = replica_group.replica_device(backend_config, context)
        return fsdp.FSDPReplicaGroup(spec, backend_config, device, connect)

    def _start_sharded(
        self,
        spec: TrainingSpec,
        backend_config: BackendConfig,
        context: ProcessContext,
        unit_bytes: int,
    ) -> ReplicaGroup:
        """Starts a process of a fully sharded run of a portable model."""
        from isotrain.adapters.torch.comm import ddp
        from isotrain.adapters.torch.sharded import replica_group as sharded

        def connect() -> ddp.DDPCommunicator:
            return ddp.DDPCommunicator(backend_config, context)

        return sharded.ShardedReplicaGroup(spec, backend_config, context, connect, unit_bytes)

    def start_pipeline(
        self,
        spec: TrainingSpec,
        backend_config: BackendConfig,
        context: ProcessContext,
        split: PipelineSplit,
    ) -> ReplicaGroup:
        keras_backend.set_backend("torch")
        from isotrain.adapters.torch.pipeline import comm as pipeline_comm
        from isotrain.adapters.torch.pipeline import process_group_comm
        from isotrain.adapters.torch.pipeline import replica_group as pipeline_group
        from isotrain.adapters.torch.replica import replica_group as replica_group

        def connect() -> pipeline_comm.PipelineCommunicator:
            return process_group_comm.ProcessGroupPipelineCommunicator(backend_config, context)

        device = replica_group.replica_device(backend_config, context)
        return pipeline_group.PipelineReplicaGroup(spec, backend_config, device, connect, split)


def sharded_notes(spec: TrainingSpec) -> list[str]:
    """Notes that steps of a portable model with sharded weights are not captured."""
    if isinstance(spec.model, Mapping) or not spec.capture:
        return []
    return [
        "capture: steps of a portable model with sharded weights are not captured: Keras computes each step"
        " eagerly, and weights are gathered as it reads them"
    ]


_GLOO_ERRORS = ("/gloo/", "pair closure")
"""Substrings of Gloo's errors, which are plain RuntimeErrors: a source file of Gloo, or a lost connection."""


def is_torch_peer_error(error: BaseException) -> bool:
    """Whether an error of torch says that another process has ended, or did not answer in time."""
    if "torch" not in sys.modules:
        return False
    import torch.distributed as dist

    if isinstance(error, dist.DistError):
        return True
    return isinstance(error, RuntimeError) and any(text in str(error) for text in _GLOO_ERRORS)


def _check_values(options: Mapping[str, Any], backend: str) -> None:
    """Refuses option values that DistributedDataParallel would reject late or misinterpret."""
    for name, value in options.items():
        is_size = name == "bucket_cap_mb"
        is_valid = _is_positive(value) if is_size else isinstance(value, bool)
        if not is_valid:
            expected = "a positive number of MiB" if is_size else "true or false"
            raise PlanError(
                f"backend_options.{backend}.{name}: expected {expected}, received {value!r}."
            )


def _is_positive(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value > 0


def weight_decay_notes(spec: TrainingSpec) -> list[str]:
    """Notes that a native torch optimizer applies weight decay differently from Keras'."""
    optimizer = spec.optimizer
    differs = optimizer.weight_decay and not optimizer.decay_is_decoupled
    if not differs or not isinstance(spec.model, Mapping):
        return []
    return [
        f"weight_decay: torch's own {optimizer.name} adds it to the gradient; with Keras"
        " optimizers it is decoupled"
    ]


def torch_environment_variables(device: DeviceKind, threads: int) -> dict[str, str]:
    """Environment variables of every process with a torch replica."""
    variables = {
        keras_backend.ENVIRONMENT_VARIABLE: "torch",
        "OMP_NUM_THREADS": str(threads),
        "MKL_NUM_THREADS": str(threads),
    }
    return variables if device == "gpu" else variables | {"CUDA_VISIBLE_DEVICES": ""}


def torch_preload(spec: TrainingSpec, device: DeviceKind, *modules: str) -> StartMethod:
    """Start method of processes with torch replicas: what a fork server imports; no fork server for GPUs.

    A model that is given per framework is a native one, which does not need Keras.

    Args:
        spec: Training spec.
        device: Device of the replicas.
        *modules: Further modules to import.
    """
    if device == "gpu":
        return StartMethod(why_fresh="a process that has initialized a GPU cannot be forked")
    # torch imports its compiler, which takes as long as all the rest, when it builds the first optimizer
    imports = ("torch._dynamo", __name__, "isotrain.adapters.torch.replica.replica_group", *modules)
    if isinstance(spec.model, Mapping) or not keras_backend.is_installed():
        return StartMethod((_FAST_IMPORT, "torch", *imports))
    with_keras = (*imports, "isotrain.adapters.torch.trainer.keras")
    return StartMethod((keras_backend.LAZY_IMPORT, _FAST_IMPORT, "torch", "keras", *with_keras))


def torch_private_api_changes() -> Availability | None:
    """Reason why torch is unavailable: undocumented parts have changed; else None. Imports torch."""
    import torch

    from isotrain.adapters.torch.base import private_api as private
    from isotrain.adapters.torch.comm import powersgd

    return private_api.private_api_changes(
        "torch", torch.__version__, (*private.PROBES, *powersgd.PROBES)
    )


def torch_availability() -> Availability:
    """Whether torch is installed; imports nothing. Only portable models need Keras."""
    if importlib.util.find_spec("torch") is None:
        return Availability(False, None, "torch is not installed", INSTALL_HINT)
    return Availability(True, metadata.version("torch"))


def _is_cuda_build() -> bool:
    torch_spec = importlib.util.find_spec("torch")
    if torch_spec is None or torch_spec.origin is None:
        return False
    return (Path(torch_spec.origin).parent / "lib" / "libtorch_cuda.so").exists()


def _built(available: bool, name: str) -> Availability:
    if available:
        return Availability(True)
    return Availability(False, None, f"this build of torch has no {name}", "use another collective")


def _nccl(available: bool, gpus: int) -> Availability:
    if not available:
        return _built(False, "NCCL")
    if not gpus:
        return Availability(False, None, "no NVIDIA GPU is visible", "use gloo")
    return Availability(True)
