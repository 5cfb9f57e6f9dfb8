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
    if target.shape != value.shape:
        raise IsotrainError(
            f"{name!r} has shape {tuple(target.shape)} in this model, and the given state has"
            f" {tuple(value.shape)}."
        )
    target.copy_(value)


def copied(tensor: torch.Tensor, into: np.ndarray | None) -> np.ndarray:
    """As `to_numpy`, in the memory of an array that is there already, where it has the shape and type."""
    if into is None or into.shape != tuple(tensor.shape):
        return to_numpy(tensor)
    kept = torch.from_numpy(into)
    if kept.dtype != (torch.float32 if tensor.dtype == torch.bfloat16 else tensor.dtype):
        return to_numpy(tensor)
    kept.copy_(tensor.detach())
    return into


def to_numpy(tensor: torch.Tensor) -> np.ndarray:
    """Copies a tensor to NumPy; bfloat16, which NumPy lacks, becomes float32."""
    tensor = tensor.detach()
    if tensor.dtype == torch.bfloat16:
        tensor = tensor.float()
    return np.array(tensor.cpu().numpy())
