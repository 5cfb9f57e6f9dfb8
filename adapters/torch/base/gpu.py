"""GPUs of torch: the only module of a run that calls `torch.cuda`, in whose place tests put a recorder."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import accelerator, cuda, version

from isotrain.adapters.common.nccl import NO_GPU
from isotrain.plugin import BackendConfig, PlanError, ProcessContext

CPU = torch.device("cpu")
PROFILE_ORDER = "self_device_time_total"
"""Column of torch's profiler by which its table is sorted where there are GPUs."""


def count() -> int:
    """Number of NVIDIA GPUs that torch can use; AMD's, which torch calls `cuda` as well, are not counted."""
    return cuda.device_count() if version.cuda and cuda.is_available() else 0


def absence() -> str:
    """Reason why `count` is 0, in torch's words, or the kind of accelerator that is not supported."""
    other = accelerator.current_accelerator(check_available=True)
    if other is not None and not version.cuda:
        kind = "ROCm" if version.hip else other.type
        return f"{NO_GPU}, and torch's accelerator here, {kind}, is not supported"
    try:
        cuda.init()
    except (AssertionError, RuntimeError) as error:
        return f"{NO_GPU}: {error}"
    return NO_GPU


def replica_device(backend_config: BackendConfig, context: ProcessContext) -> torch.device:
    """Device of this process's replica: the GPU of its local rank, made the current one, or the CPU.

    With fewer GPUs than processes on the host, local rank n shares GPU n modulo their number, but over NCCL.

    Raises:
        PlanError: torch can use no GPU, or NCCL has too few.
    """
    if backend_config.device == "cpu":
        return CPU
    gpus = count()
    if not gpus:
        raise PlanError(f"process {context.rank} cannot use a GPU, and device is gpu: {absence()}")
    if backend_config.collective == "nccl" and context.local_rank >= gpus:
        raise PlanError(
            f"process {context.rank} needs GPU {context.local_rank} of its host, and torch sees only {gpus}."
            " Use at most one replica per GPU, or another collective."
        )
    device = torch.device("cuda", context.local_rank % gpus)
    cuda.set_device(device)
    return device


def copy_from_host(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Copy of a host tensor of any shape on a GPU, in the order of the GPU's default stream.

    The host does not wait: the copy is made from pinned memory, which torch frees after the copy.
    """
    with cuda.device(device):  # else pinning in a thread makes a context on GPU 0
        return tensor.pin_memory().to(device, non_blocking=True)


def synchronize(device: torch.device) -> None:
    """Waits for all that was queued on a device."""
    if device.type != "cpu":
        cuda.synchronize(device)


def holding(tensors: Iterable[torch.Tensor]) -> list[torch.device]:
    """GPUs that hold some of these tensors, in order."""
    return sorted({tensor.device for tensor in tensors if tensor.device.type == "cuda"}, key=str)


def in_use() -> list[torch.device]:
    """The current GPU, where this process uses GPUs."""
    return [torch.device("cuda", cuda.current_device())] if cuda.is_initialized() else []


def rng_state(device: torch.device) -> torch.Tensor:
    """Copy of the state of a device's default generator, a uint8 vector."""
    return torch.get_rng_state() if device.type == "cpu" else cuda.get_rng_state(device)


def set_rng_state(state: torch.Tensor, device: torch.device) -> None:
    """Restores the state, a uint8 vector, of a device's default generator."""
    if device.type == "cpu":
        torch.set_rng_state(state)
    else:
        cuda.set_rng_state(state, device)
