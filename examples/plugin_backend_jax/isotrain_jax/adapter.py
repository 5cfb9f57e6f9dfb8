"""Declares `jax-mesh`; imports JAX only when a run starts."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Mapping
from importlib import metadata
from typing import TYPE_CHECKING

from isotrain.plugin import (
    DATA,
    PARAMETER_SERVER_CAPABILITIES,
    REPLICATED_CAPABILITIES,
    SHARD,
    Availability,
    BackendConfig,
    Capabilities,
    Capability,
    DeviceKind,
    Examination,
    ProcessContext,
    StartMethod,
    TcpParameterServer,
    UnsupportedError,
    keras_backend,
    sharded_group,
    visible_gpus,
)

if TYPE_CHECKING:
    from isotrain.plugin import Plan, ReplicaGroup, TrainingSpec
    from isotrain_jax.mesh import ReplicaMesh

INSTALL_HINT = "install JAX and Keras: pip install jax keras"
_LOST_PEER = ("gloo", "Gloo", "UNAVAILABLE", "DEADLINE_EXCEEDED", "ABORTED", "CANCELLED")
"""Words in XLA's messages about a lost peer: all of its errors have one class."""
_CUDA_PLUGINS = ("jax_cuda12_plugin", "jax_cuda13_plugin")
_REPLICATED = REPLICATED_CAPABILITIES.with_changes(
    lacks={Capability.BFLOAT16_COLLECTIVES: "XLA sums bfloat16 between CPUs as float32"}
)


_FULLY_SHARDED = Capabilities.only(
    {
        Capability.SYNCHRONOUS_STEP,
        Capability.NAMED_STATE,
        Capability.UNSHARD_WEIGHTS,
        Capability.HYBRID_SHARDING,
    },
    "a replica has a part of each weight",
)
_WHOLE_IN_STEPS = (
    "sharded: XLA decides when a step joins weights and lets them go, whatever bucket_megabytes says; on"
    " CPUs, and where slices differ in size, it has all of them until its backward pass ends, which the"
    " memory per replica does not count"
)


class JaxMesh(TcpParameterServer):
    """One compiled step over a mesh of every process's device."""

    name = "jax-mesh"
    framework = "jax"
    summary = "JAX shard_map over a mesh of devices, one process per replica"
    collectives = {
        "auto": "nccl on GPUs, gloo on CPUs",
        "gloo": "over TCP, for CPUs",
        "nccl": "NVIDIA's collectives, for GPUs",
    }
    packages = ("jax", "jaxlib", "keras")
    ignored_log_lines = ("WARNING: All log messages before absl", r"[IW][0-9]{4} [0-9:. ]+ ")
    exports = frozenset({"keras", "keras-weights"})
    capabilities = {
        "replicated": _REPLICATED,
        "parameter-server": PARAMETER_SERVER_CAPABILITIES,
        "sharded": sharded_group(_REPLICATED),
        "fully-sharded": _FULLY_SHARDED,
        "tensor": Capabilities.none("its models are not cut within layers"),
        "pipeline": Capabilities.none(
            "all its replicas live in one process, and each stage needs its own"
        ),
    }

    def availability(self) -> Availability:
        for package in ("jax", "jaxlib", "keras"):
            if importlib.util.find_spec(package) is None:
                return Availability(False, None, f"{package} is not installed", INSTALL_HINT)
        return Availability(True, metadata.version("jax"))

    def examine(self) -> Examination:
        keras_backend.set_backend("jax")
        import jax
        import jaxlib
        import keras

        from isotrain.plugin import keras_private, private_api
        from isotrain_jax import attention, private

        versions = {
            "jax": jax.__version__,
            "jaxlib": jaxlib.__version__,
            "keras": keras.__version__,
        }
        of_keras = (*keras_private.PROBES, *attention.PROBES)
        fault = private_api.private_api_changes("JAX", jax.__version__, private.PROBES)
        fault = fault or private_api.private_api_changes("Keras", keras.__version__, of_keras)
        if fault:
            return Examination(fault, versions=versions)
        on_gpus = jax.default_backend() == "gpu"
        nccl = Availability(True) if on_gpus else _unusable("JAX sees no NVIDIA GPU", "use gloo")
        collectives = {"auto": Availability(True), "gloo": Availability(True), "nccl": nccl}
        return Examination(Availability(True, jax.__version__), collectives, versions)

    def check_layout(self, spec: TrainingSpec, parallel_layout: str) -> list[str]:
        return [_WHOLE_IN_STEPS] if parallel_layout == "fully-sharded" else []

    def exchanged_bytes(self, plan: Plan, spec: TrainingSpec) -> float:
        """Bytes that a replica sends per step; fully sharded: all-gathers and gradient sums per micro-batch.

        On CPUs XLA merges all all-gathers of the same weights in a step.
        """
        if plan.parallel_layout != "fully-sharded":
            return super().exchanged_bytes(plan, spec)
        joined = 1 if plan.device == "cpu" else 2 * plan.gradient_accumulation_steps
        parts, hosts = plan.device_mesh.size(SHARD), plan.device_mesh.size(DATA)
        inside, between = (parts - 1) / parts, 2 * (hosts - 1) / (hosts * parts)
        times = joined * inside + plan.gradient_accumulation_steps * (inside + between)
        return times * (plan.gradient_bytes or 0)

    def accelerators(self) -> int:
        has_cuda = any(importlib.util.find_spec(plugin) for plugin in _CUDA_PLUGINS)
        return visible_gpus() if has_cuda else 0

    def resolve_collective(
        self, requested: str | None, *, device: DeviceKind, replicas: int
    ) -> str:
        name = self.collective_or_default(requested)
        right = "nccl" if device == "gpu" else "gloo"
        if name not in ("auto", right):
            raise UnsupportedError(
                f"jax-mesh:{name} does not exchange between {device.upper()}s, which this run uses:"
                f" XLA has {right} there. Use jax-mesh:{right}."
            )
        return right

    def environment_variables(
        self, *, device: DeviceKind, threads: int, replicas: int
    ) -> dict[str, str]:
        variables = {
            keras_backend.ENVIRONMENT_VARIABLE: "jax",
            "JAX_PLATFORMS": "cuda" if device == "gpu" else "cpu",
            "NPROC": str(threads),  # from which XLA takes the size of its pools on CPUs
            "OMP_NUM_THREADS": str(threads),
        }
        return variables if device == "gpu" else variables | {"CUDA_VISIBLE_DEVICES": ""}

    def preload(self, spec: TrainingSpec, *, device: DeviceKind) -> StartMethod:
        if device == "gpu":
            return StartMethod(why_fresh="a process that has seen a GPU cannot be forked")
        # JAX starts its threads when it is first asked for devices
        return StartMethod((keras_backend.LAZY_IMPORT, "jax", "keras", "isotrain_jax.group"))

    def is_peer_error(self, error: BaseException) -> bool:
        if "jax" not in sys.modules:
            return False
        import jax

        # A failed exchange is told by either, whether it is computed at once or waited for.
        is_of_jax = isinstance(error, jax.errors.JaxRuntimeError | ValueError)
        return is_of_jax and any(words in str(error) for words in _LOST_PEER)

    def start(
        self, spec: TrainingSpec, backend_config: BackendConfig, context: ProcessContext
    ) -> ReplicaGroup:
        ties = _joined(spec, backend_config, context)
        from isotrain_jax.group import JaxReplicaGroup  # imports Keras, which may ask for devices
        from isotrain_jax.sharded import ShardedGroup

        in_shares = SHARD in context.device_mesh.sizes
        return ShardedGroup(spec, ties) if in_shares else JaxReplicaGroup(spec, ties)

    def start_fully_sharded(
        self,
        spec: TrainingSpec,
        backend_config: BackendConfig,
        context: ProcessContext,
        unit_bytes: int,
    ) -> ReplicaGroup:
        """Starts a fully sharded group; XLA decides how many weights are gathered together."""
        ties = _joined(spec, backend_config, context, context.device_mesh.sizes)
        from isotrain_jax.fully_sharded import FullyShardedGroup

        return FullyShardedGroup(spec, ties, context)


def _joined(
    spec: TrainingSpec,
    backend_config: BackendConfig,
    context: ProcessContext,
    sizes: Mapping[str, int] | None = None,
) -> ReplicaMesh:
    """Device mesh of all processes, after their rendezvous; `sizes` as `ReplicaMesh` takes them."""
    keras_backend.set_backend("jax")
    from isotrain_jax import mesh

    mesh.configure(backend_config, context)
    if context.replicas > 1:
        mesh.join(spec, backend_config, context)
    return mesh.ReplicaMesh(sizes)


def _unusable(reason: str, hint: str) -> Availability:
    return Availability(False, None, reason, hint)
