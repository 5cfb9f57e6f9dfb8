"""Declares `jax-mesh`; imports JAX only when a run starts."""

from __future__ import annotations

import importlib.util
import sys
from importlib import metadata
from typing import TYPE_CHECKING

from isotrain.plugin import (
    NOT_REPLICATED,
    SERVED_GROUP,
    Capabilities,
    Capability,
    DeviceKind,
    Examination,
    ProcessContext,
    ServedOverTcp,
    Setting,
    Start,
    UnsupportedError,
    Usability,
    keras_backend,
    visible_gpus,
)

if TYPE_CHECKING:
    from isotrain.plugin import ReplicaGroup, TrainingSpec

INSTALL_HINT = "install JAX and Keras: pip install jax keras"
_LOST_PEER = ("gloo", "Gloo", "UNAVAILABLE", "DEADLINE_EXCEEDED", "ABORTED", "CANCELLED")
"""In what XLA says of a peer that is gone: its errors all have one class."""
_CUDA_PLUGINS = ("jax_cuda12_plugin", "jax_cuda13_plugin")
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
        }
    ),
    NOT_REPLICATED | {Capability.BFLOAT16_EXCHANGE: "XLA sums bfloat16 between CPUs as float32"},
)


class JaxMesh(ServedOverTcp):
    """One compiled step over a mesh of every process's device."""

    name = "jax-mesh"
    framework = "jax"
    summary = "JAX shard_map over a mesh of devices, one process per replica"
    collectives = {
        "auto": "nccl on GPUs, gloo on CPUs",
        "gloo": "over TCP, for CPUs",
        "nccl": "NVIDIA's collectives, for GPUs",
    }
    replicas_per_process = "one"
    packages = ("jax", "jaxlib", "keras")
    usual_lines = ("WARNING: All log messages before absl", r"[IW][0-9]{4} [0-9:. ]+ ")
    exports = frozenset({"keras", "keras-weights"})
    capabilities = {
        "replicated": _REPLICATED,
        "served": SERVED_GROUP,
        "sharded": Capabilities.none("its compiled step updates all weights on each replica"),
        "staged": Capabilities.none(
            "all its replicas live in one process, and stages need one each"
        ),
    }

    def usability(self) -> Usability:
        for package in ("jax", "jaxlib", "keras"):
            if importlib.util.find_spec(package) is None:
                return Usability(False, None, f"{package} is not installed", INSTALL_HINT)
        return Usability(True, metadata.version("jax"))

    def examine(self) -> Examination:
        keras_backend.claim("jax")
        import jax
        import jaxlib
        import keras

        from isotrain.plugin import keras_private, private_parts
        from isotrain_jax import attention, private

        versions = {
            "jax": jax.__version__,
            "jaxlib": jaxlib.__version__,
            "keras": keras.__version__,
        }
        of_keras = (*keras_private.PARTS, *attention.PARTS)
        fault = private_parts.changed("JAX", jax.__version__, private.PARTS)
        fault = fault or private_parts.changed("Keras", keras.__version__, of_keras)
        if fault:
            return Examination(fault, versions=versions)
        on_gpus = jax.default_backend() == "gpu"
        nccl = Usability(True) if on_gpus else _unusable("JAX sees no NVIDIA GPU", "use gloo")
        collectives = {"auto": Usability(True), "gloo": Usability(True), "nccl": nccl}
        return Examination(Usability(True, jax.__version__), collectives, versions)

    def accelerators(self) -> int:
        has_cuda = any(importlib.util.find_spec(plugin) for plugin in _CUDA_PLUGINS)
        return visible_gpus() if has_cuda else 0

    def resolve_collective(
        self, requested: str | None, *, device: DeviceKind, replicas: int
    ) -> str:
        name = self.known_collective(requested)
        right = "nccl" if device == "gpu" else "gloo"
        if name not in ("auto", right):
            raise UnsupportedError(
                f"jax-mesh:{name} does not exchange between {device.upper()}s, which this run uses:"
                f" XLA has {right} there. Use jax-mesh:{right}."
            )
        return right

    def variables(self, *, device: DeviceKind, threads: int, replicas: int) -> dict[str, str]:
        variables = {
            keras_backend.VARIABLE: "jax",
            "JAX_PLATFORMS": "cuda" if device == "gpu" else "cpu",
            "NPROC": str(threads),  # from which XLA takes the size of its pools on CPUs
            "OMP_NUM_THREADS": str(threads),
        }
        return variables if device == "gpu" else variables | {"CUDA_VISIBLE_DEVICES": ""}

    def preload(self, spec: TrainingSpec, *, device: DeviceKind) -> Start:
        if device == "gpu":
            return Start(why_fresh="a process that has seen a GPU cannot be forked")
        # JAX starts its threads when it is first asked for devices
        return Start((keras_backend.DEFERRED, "jax", "keras", "isotrain_jax.group"))

    def blames_peer(self, error: BaseException) -> bool:
        if "jax" not in sys.modules:
            return False
        import jax

        # A failed exchange is told by either, whether it is computed at once or waited for.
        is_of_jax = isinstance(error, jax.errors.JaxRuntimeError | ValueError)
        return is_of_jax and any(words in str(error) for words in _LOST_PEER)

    def start(self, spec: TrainingSpec, setting: Setting, context: ProcessContext) -> ReplicaGroup:
        keras_backend.claim("jax")
        from isotrain_jax import mesh

        mesh.configure(setting, context)
        if context.replicas > 1:
            mesh.join(spec, setting, context)
        from isotrain_jax.group import JaxReplicaGroup  # imports Keras, which may ask for devices

        return JaxReplicaGroup(spec, mesh.ReplicaMesh())


def _unusable(reason: str, hint: str) -> Usability:
    return Usability(False, None, reason, hint)
