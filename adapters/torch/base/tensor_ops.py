"""Tensor functions for strategies (names of `keras.ops`), on torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from isotrain.plugin import TensorFunctions


class TorchFunctions(TensorFunctions):
    """The same results as `keras.ops` on torch, to the bit, without Keras."""

    def __init__(self, device: torch.device) -> None:
        """Sets the device of new tensors."""
        self._device = device

    def abs(self, x: torch.Tensor) -> torch.Tensor:
        return x.abs()

    def cast(self, x: torch.Tensor, dtype: str | torch.dtype) -> torch.Tensor:
        return torch.as_tensor(x, device=self._device).to(_dtype(dtype))

    def concatenate(self, xs: Sequence[torch.Tensor], axis: int = 0) -> torch.Tensor:
        return torch.cat(list(xs), axis)

    def maximum(self, x1: torch.Tensor, x2: torch.Tensor) -> torch.Tensor:
        return torch.maximum(x1, x2)

    def qr(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        q, r = torch.linalg.qr(x)
        return q, r

    def reshape(self, x: torch.Tensor, newshape: Sequence[int]) -> torch.Tensor:
        return x.reshape(tuple(newshape))

    def scatter(
        self, indices: torch.Tensor, values: torch.Tensor, shape: Sequence[int]
    ) -> torch.Tensor:
        return values.new_zeros(tuple(shape)).index_add_(0, indices[:, 0], values)

    def split(
        self, x: torch.Tensor, indices_or_sections: Sequence[int], axis: int = 0
    ) -> list[torch.Tensor]:
        return list(torch.tensor_split(x, list(indices_or_sections), axis))

    def take(self, x: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
        return x[indices.long()]

    def top_k(
        self, x: torch.Tensor, k: int, sorted: bool = True
    ) -> tuple[torch.Tensor, torch.Tensor]:
        values, indices = torch.topk(x, k, sorted=sorted)
        return values, indices

    def transpose(self, x: torch.Tensor) -> torch.Tensor:
        return x.t()

    def zeros(self, shape: Sequence[int], dtype: str | torch.dtype) -> torch.Tensor:
        return torch.zeros(tuple(shape), dtype=_dtype(dtype), device=self._device)

    def zeros_like(self, x: torch.Tensor) -> torch.Tensor:
        return torch.zeros_like(x)


def _dtype(dtype: str | torch.dtype) -> torch.dtype:
    """A dtype, also by its name."""
    resolved: Any = getattr(torch, dtype) if isinstance(dtype, str) else dtype
    return resolved
