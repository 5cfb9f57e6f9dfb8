"""Declares `torch-ddp`; imports torch only when a run starts."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from isotrain.adapters.common import nccl
from isotrain.adapters.common.layout_capabilities import fully_sharded_bytes, layout_capabilities
from isotrain.adapters.keras import backend as keras_backend
from isotrain.adapters.torch.base_adapter import INSTALL_HINT, TorchAdapter
from isotrain.plugin import (
    REPLICATED_CAPABILITIES,
    Availability,
    BackendConfig,
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
    from isotrain.adapters.torch.comm.base import Communicator
    from isotrain.adapters.torch.pipeline.comm import PipelineCommunicator
    from isotrain.plugin import Plan, ReplicaGroup, TrainingSpec

_REPLICATED = REPLICATED_CAPABILITIES.with_changes(
    has={
        Capability.BFLOAT16_COLLECTIVES,
        Capability.ORDERED_SUMS,
        Capability.ASYNCHRONOUS_COLLECTIVES,
    }
)


class TorchDDP(TorchAdapter):
    """torch.nn.parallel.DistributedDataParallel over torch.distributed."""

    name = "torch-ddp"
    summary = "PyTorch DistributedDataParallel, one process per replica"
    collectives = {
        "auto": "nccl on GPUs, gloo on CPUs",
        "gloo": "over TCP, for CPUs; works for GPUs, slowly",
        "nccl": "NVIDIA's collectives, for GPUs",
        "mpi": "where torch itself was built with MPI",
    }
    gpu_sharing_collectives = frozenset({"gloo"})
    sync_batchnorm_devices = frozenset({"gpu"})  # torch.nn.SyncBatchNorm refuses tensors of CPUs
    packages = ("torch", "keras")
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
        return self.framework_availability()

    def examine(self) -> Examination:
        keras_backend.set_backend("torch")
        import torch
        import torch.distributed as dist

        from isotrain.adapters.torch.base import gpu

        versions = {"torch": torch.__version__, **keras_backend.version()}
        if not dist.is_available():
            reason = "this build of torch has no torch.distributed"
            return Examination(Availability(False, torch.__version__, reason, INSTALL_HINT))
        fault = self.framework_private_api_changes() or keras_backend.private_api_changes()
        if fault:
            return Examination(fault, versions=versions)
        gpus = gpu.count()
        collectives = {
            "gloo": _built(dist.is_gloo_available(), "gloo"),
            "nccl": nccl.availability(gpus, absence=gpu.absence(), instead="gloo")
            if dist.is_nccl_available()
            else _built(False, "NCCL"),
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
        return super().check(spec, options, replicas=replicas)

    def accelerators(self) -> int:
        return visible_gpus() if _is_cuda_build() else 0

    def resolve_collective(
        self, requested: str | None, *, device: DeviceKind, replicas: int
    ) -> str:
        name = self.collective_or_default(requested)
        if name == "mpi":
            raise UnsupportedError(
                "torch-ddp:mpi needs a torch that was compiled with MPI and processes started by"
                " mpirun; torch's published builds have no MPI. Use torch-ddp:gloo."
            )
        return nccl.resolve(self, name, device, on_cpu="gloo")

    def preload(self, spec: TrainingSpec, *, device: DeviceKind) -> StartMethod:
        return self.forked(spec, device, __name__, "isotrain.adapters.torch.comm.ddp")

    def exchanged_bytes(self, plan: Plan, spec: TrainingSpec) -> float:
        """Bytes that a replica sends per step.

        For native models torch's FSDP reduce-scatters: on Gloo that moves as much as an all-reduce.
        """
        is_native = isinstance(spec.model, Mapping)
        if plan.parallel_layout == "fully-sharded" and is_native and plan.collective == "gloo":
            return fully_sharded_bytes(plan, sums=2)
        return super().exchanged_bytes(plan, spec)

    def is_peer_error(self, error: BaseException) -> bool:
        return is_torch_peer_error(error)

    def why_not_elastic(self, requires: frozenset[Capability]) -> str | None:
        return None

    def interrupt_group(self) -> None:
        from isotrain.adapters.torch.comm.process_group import interrupt_process_group

        interrupt_process_group()

    def abandon_group(self) -> None:
        from isotrain.adapters.torch.comm.ddp import abandon_communicators

        abandon_communicators()

    def start_fully_sharded(
        self,
        spec: TrainingSpec,
        backend_config: BackendConfig,
        context: ProcessContext,
        unit_bytes: int,
    ) -> ReplicaGroup:
        if not isinstance(spec.model, Mapping) or spec.reproducible:
            return super().start_fully_sharded(spec, backend_config, context, unit_bytes)
        keras_backend.set_backend("torch")
        from isotrain.adapters.torch.base.gpu import replica_device
        from isotrain.adapters.torch.sharded.fsdp import FSDPCommunicator, FSDPReplicaGroup

        def connect() -> FSDPCommunicator:
            return FSDPCommunicator(backend_config, context, unit_bytes)

        return FSDPReplicaGroup(
            spec, backend_config, replica_device(backend_config, context), connect
        )

    def connect(self, backend_config: BackendConfig, context: ProcessContext) -> Communicator:
        from isotrain.adapters.torch.comm.ddp import DDPCommunicator

        return DDPCommunicator(backend_config, context)

    def connect_pipeline(
        self, backend_config: BackendConfig, context: ProcessContext
    ) -> PipelineCommunicator:
        from isotrain.adapters.torch.pipeline.process_group_comm import (
            ProcessGroupPipelineCommunicator,
        )

        return ProcessGroupPipelineCommunicator(backend_config, context)


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


def _is_cuda_build() -> bool:
    torch_spec = importlib.util.find_spec("torch")
    if torch_spec is None or torch_spec.origin is None:
        return False
    return (Path(torch_spec.origin).parent / "lib" / "libtorch_cuda.so").exists()


def _built(available: bool, name: str) -> Availability:
    if available:
        return Availability(True)
    return Availability(False, None, f"this build of torch has no {name}", "use another collective")
