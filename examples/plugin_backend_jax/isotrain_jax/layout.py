"""Shards of weights and slots: which part a replica has, from shapes alone.

JAX cuts an array into equal parts only. Where a length does not divide, the last parts are padded to the
length of the first; nobody sees the padding.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

Shape = Sequence[int]


def shard_axis(shape: Shape, replicas: int) -> int | None:
    """The axis along which an array is sharded: the longest, and one without padding where there is one.

    None where there is one replica, or no axis is that long: each replica then has all of it.
    """
    axes = [axis for axis, size in enumerate(shape) if size >= replicas > 1]
    even = [axis for axis in axes if shape[axis] % replicas == 0]
    return max(even or axes, key=lambda axis: shape[axis], default=None)


def shard_shape(shape: Shape, replicas: int) -> tuple[int, ...]:
    """Shape of a replica's shard, padding included."""
    cut = shard_axis(shape, replicas)
    return tuple(-(-size // replicas) if axis == cut else size for axis, size in enumerate(shape))


def shard_extent(shape: Shape, held: Shape, rank: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Offset and shape of a replica's shard in an array; `held` is the shard's shape with padding."""
    offset = tuple(
        0 if own == size else min(rank * own, size) for size, own in zip(shape, held, strict=True)
    )
    part = tuple(
        min(own, size - start) for size, own, start in zip(shape, held, offset, strict=True)
    )
    return offset, part


def shard(array: np.ndarray, held: Shape, rank: int) -> np.ndarray:
    """A replica's shard of an array, padded to the shape `held`."""
    offset, part = shard_extent(array.shape, held, rank)
    slices = [slice(start, start + own) for start, own in zip(offset, part, strict=True)]
    return pad(array[tuple(slices)], held)


def pad(array: np.ndarray, shape: Shape) -> np.ndarray:
    """Pads an array with zeros, at the ends of its axes, to a shape."""
    return np.pad(array, [(0, size - own) for own, size in zip(array.shape, shape, strict=True)])


def unpad(array: Any, shape: Shape) -> Any:
    """Inverse of `pad`: the array cut to a shape."""
    return array[tuple(slice(size) for size in shape)]
