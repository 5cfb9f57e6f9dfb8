"""The order of the axes of Keras' kernels and images, which traces have in torch's order."""

from __future__ import annotations

import numpy as np

_KERNELS = ("kernel", "recurrent_kernel")
_IMAGE_AXES = (4, 5)
"""Numbers of axes of a batch of images or videos."""


def kernel_axes(name: str, rank: int) -> str | None:
    """Orders of the axes of a kernel in Keras and in torch, such as `HWIO->OIHW`; None for other tensors.

    A layer's path is before the kernel's name: a parameter of torch that is named `kernel` has other axes.

    Args:
        name: Path of a weight, or of its optimizer state (`WEIGHT/SLOT`).
        rank: Number of axes.
    """
    within_a_layer = [word.partition("#")[0] for word in name.split("/")[1:]]
    if not 2 <= rank <= 5 or not any(word in _KERNELS for word in within_a_layer[-2:]):
        return None
    spatial = "DHW"[5 - rank :]
    return f"{spatial}IO->OI{spatial}"


def in_torch_order(name: str, array: np.ndarray) -> np.ndarray:
    """A view of a tensor with its axes in torch's order."""
    if kernel_axes(name, array.ndim) is None:
        return array
    return array.transpose(-1, -2, *range(array.ndim - 2))


def channels_first(batch: np.ndarray) -> np.ndarray:
    """A batch of images or videos, shape `[samples, ..., channels]`, as `[samples, channels, ...]`.

    Batches with fewer axes are returned as they are.
    """
    return np.moveaxis(batch, -1, 1) if batch.ndim in _IMAGE_AXES else batch
