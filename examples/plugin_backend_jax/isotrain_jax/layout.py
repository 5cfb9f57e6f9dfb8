"""Which part of a weight or slot a replica has: arithmetic of shapes alone.

JAX cuts an array into equal parts only. Where a length does not divide, the last parts are padded to the
length of the first; nobody sees the padding.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

Shape = Sequence[int]


def shard_axis(shape: Shape, replicas: int) -> int | None:
    """The axis along which each replica has a part of an array: the longest, if it can be without padding.

    None where there is one replica, or no axis as long as there are replicas: each has all of it.
    """
    axes = [axis for axis, size in enumerate(shape) if size >= replicas > 1]
    even = [axis for axis in axes if shape[axis] % replicas == 0]
    return max(even or axes, key=lambda axis: shape[axis], default=None)


def shard_shape(shape: Shape, replicas: int) -> tuple[int, ...]:
    """The shape of what a replica holds, padding included."""
    cut = shard_axis(shape, replicas)
    return tuple(-(-size // replicas) if axis == cut else size for axis, size in enumerate(shape))


def shard_extent(shape: Shape, held: Shape, rank: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Where in an array of this shape a replica's part begins, and its shape, of which it holds `held`."""
    offset = tuple(
        0 if own == size else min(rank * own, size) for size, own in zip(shape, held, strict=True)
    )
    part = tuple(
        min(own, size - start) for size, own, start in zip(shape, held, offset, strict=True)
    )
    return offset, part


def shard(array: np.ndarray, held: Shape, rank: int) -> np.ndarray:
    """What a replica holds of the whole of an array."""
    offset, part = shard_extent(array.shape, held, rank)
    slices = [slice(start, start + own) for start, own in zip(offset, part, strict=True)]
    return pad(array[tuple(slices)], held)


def pad(array: np.ndarray, shape: Shape) -> np.ndarray:
    """Pads an array at the ends of its axes."""
    return np.pad(array, [(0, size - own) for own, size in zip(array.shape, shape, strict=True)])


def unpad(array: Any, shape: Shape) -> Any:
    """Takes padding away."""
    return array[tuple(slice(size) for size in shape)]
