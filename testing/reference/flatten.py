"""Many arrays as one vector: what is exchanged in one go."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from isotrain.testing.reference.layers import Array


def flatten(arrays: Sequence[Array]) -> Array:
    """All numbers, one array after the other, in the widest of their types."""
    return np.concatenate([np.ravel(array) for array in arrays] or [np.zeros(0)])


def unflatten_like(vector: Array, arrays: Sequence[Array]) -> list[Array]:
    """A vector cut into arrays of the shapes and types of these."""
    parts = np.split(vector, np.cumsum([array.size for array in arrays]))
    return [
        part.astype(array.dtype).reshape(array.shape)
        for part, array in zip(parts[:-1], arrays, strict=True)
    ]


def unflatten_into(vector: Array, arrays: Sequence[Array]) -> None:
    """Writes a vector into arrays."""
    for array, value in zip(arrays, unflatten_like(vector, arrays), strict=True):
        array[...] = value
