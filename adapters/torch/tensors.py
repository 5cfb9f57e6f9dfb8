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


def to_numpy(tensor: torch.Tensor) -> np.ndarray:
    """Copies a tensor to NumPy; bfloat16, which NumPy lacks, becomes float32."""
    tensor = tensor.detach()
    if tensor.dtype == torch.bfloat16:
        tensor = tensor.float()
    return np.array(tensor.cpu().numpy())
