"""Tensors from NumPy arrays, and back."""

from __future__ import annotations

import numpy as np
import torch

from isotrain.plugin import IsotrainError


def overwrite(name: str, target: torch.Tensor, value: torch.Tensor) -> None:
    """Copies `value` into `target`, which keeps its dtype and device.

    Raises:
        IsotrainError: The shapes differ.
    """
    if target.shape != value.shape and own_part(target).shape != value.shape:
        raise IsotrainError(
            f"{name!r} has shape {tuple(target.shape)} in this model, and the given state has"
            f" {tuple(value.shape)}."
        )
    own = own_part(target)
    if own is not target and own.shape != value.shape:
        value = value[where(target)]
    own.copy_(value)


def own_part(tensor: torch.Tensor) -> torch.Tensor:
    """What this process has of a tensor: all of it, or the part of a `DTensor`."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def where(tensor: torch.Tensor) -> tuple[slice, ...]:
    """Where in the whole of it this process's part of a `DTensor` is, which `fully_shard` cuts by rows.

    The last axis of its mesh is that of the parts; along another, all have the same.
    """
    mesh = tensor.device_mesh
    axis = mesh.ndim - 1
    rows, *others = tensor.shape
    start = min(rows, mesh.get_local_rank(axis) * -(-rows // mesh.size(axis)))
    return slice(start, start + len(own_part(tensor))), *(slice(0, size) for size in others)


def copied(tensor: torch.Tensor, into: np.ndarray | None) -> np.ndarray:
    """As `to_numpy`, in the memory of an array that is there already, where it has the shape and type."""
    tensor = own_part(tensor)
    if into is None or into.shape != tuple(tensor.shape):
        return to_numpy(tensor)
    kept = torch.from_numpy(into)
    if kept.dtype != (torch.float32 if tensor.dtype == torch.bfloat16 else tensor.dtype):
        return to_numpy(tensor)
    kept.copy_(tensor.detach())
    return into


def to_numpy(tensor: torch.Tensor) -> np.ndarray:
    """Copies a tensor to NumPy; bfloat16, which NumPy lacks, becomes float32."""
    tensor = own_part(tensor.detach())
    if tensor.dtype == torch.bfloat16:
        tensor = tensor.float()
    copy = torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor)
    array: np.ndarray = copy.numpy()  # of the tensor itself, it would never again let its memory go
    return array
