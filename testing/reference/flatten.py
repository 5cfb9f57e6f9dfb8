"""Flattening of many arrays into one vector, so that one collective carries them all; copies of arrays."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import numpy as np

from isotrain.testing.reference.layers import Array


def flatten(arrays: Sequence[Array]) -> Array:
    """Concatenates arrays of any shapes to a vector, shape [total size], of their widest dtype."""
    return np.concatenate([np.ravel(array) for array in arrays] or [np.zeros(0)])


def unflatten_like(vector: Array, arrays: Sequence[Array]) -> list[Array]:
    """Splits a vector, shape [total size], into arrays of the shapes and dtypes of `arrays`."""
    parts = np.split(vector, np.cumsum([array.size for array in arrays]))
    return [
        part.astype(array.dtype).reshape(array.shape)
        for part, array in zip(parts[:-1], arrays, strict=True)
    ]


def unflatten_into(vector: Array, arrays: Sequence[Array]) -> None:
    """Copies a vector, shape [total size], into arrays, in place."""
    for array, value in zip(arrays, unflatten_like(vector, arrays), strict=True):
        array[...] = value


@contextlib.contextmanager
def restored(arrays: Sequence[Array]) -> Iterator[None]:
    """Context after which arrays, of any shapes, have the values from before it."""
    before = [array.copy() for array in arrays]
    yield
    for array, value in zip(arrays, before, strict=True):
        array[...] = value
