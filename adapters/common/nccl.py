"""NCCL, NVIDIA's collectives between GPUs: when a run uses it, and whether it can."""

from __future__ import annotations

from isotrain.plugin import Adapter, Availability, DeviceKind, UnsupportedError

NO_GPU = "no NVIDIA GPU is visible"


def availability(gpus: int, *, absence: str = NO_GPU, instead: str) -> Availability:
    """Whether a framework that was built with NCCL can use it.

    Args:
        gpus: Number of GPUs that the framework can use.
        absence: Reason why there is none.
        instead: Collective to use without one.
    """
    return Availability(True) if gpus else Availability(False, None, absence, f"use {instead}")


def resolve(adapter: Adapter, name: str, device: DeviceKind, *, on_cpu: str) -> str:
    """Collective for `auto`: NCCL on GPUs, `on_cpu` on CPUs; any other name is returned.

    Raises:
        UnsupportedError: NCCL was requested for CPUs.
    """
    if name == "auto":
        return "nccl" if device == "gpu" else on_cpu
    if name == "nccl" and device == "cpu":
        raise UnsupportedError(
            f"{adapter.name}:nccl communicates between GPUs, and this run uses CPUs. Use"
            f" {adapter.name}:{on_cpu}, or device: gpu on a machine with NVIDIA GPUs and a CUDA build of"
            f" {adapter.framework}."
        )
    return name
