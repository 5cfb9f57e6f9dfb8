"""Tensor functions for strategies, in NumPy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from isotrain.plugin import TensorFunctions, UnsupportedError
from isotrain.testing.reference.layers import Array


class NumpyTensorOps(TensorFunctions):
    """NumPy implementation of the tensor functions, on arrays of any shape."""

    def abs(self, x: Array) -> Array:
        return np.asarray(np.abs(x))

    def cast(self, x: Array, dtype: Any) -> Array:
        if dtype == "bfloat16":
            raise UnsupportedError("NumPy has no bfloat16.")
        return x.astype(dtype)

    def concatenate(self, xs: Sequence[Array], axis: int = 0) -> Array:
        return np.concatenate(xs, axis)

    def maximum(self, x1: Array, x2: Array) -> Array:
        return np.asarray(np.maximum(x1, x2))

    def qr(self, x: Array) -> tuple[Array, Array]:
        q, r = np.linalg.qr(x)
        return q, r

    def reshape(self, x: Array, newshape: Sequence[int]) -> Array:
        return x.reshape(tuple(newshape))

    def scatter(self, indices: Array, values: Array, shape: Sequence[int]) -> Array:
        sums = np.zeros(shape, values.dtype)
        np.add.at(sums, indices[:, 0], values)
        return sums

    def split(self, x: Array, indices_or_sections: Sequence[int], axis: int = 0) -> list[Array]:
        return np.split(x, list(indices_or_sections), axis)

    def take(self, x: Array, indices: Array) -> Array:
        return np.asarray(x[indices])

    def top_k(self, x: Array, k: int, sorted: bool = True) -> tuple[Array, Array]:
        indices = np.argsort(-x, kind="stable")[:k].astype(np.int32)
        return x[indices], indices

    def transpose(self, x: Array) -> Array:
        return x.T

    def zeros(self, shape: Sequence[int], dtype: Any) -> Array:
        return np.zeros(shape, dtype)

    def zeros_like(self, x: Array) -> Array:
        return np.zeros_like(x)
