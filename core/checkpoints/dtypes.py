"""The dtypes of stored tensors, by their own names, and the bytes that stand for them."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np

from isotrain.core.errors import CheckpointError

CODES = {
    "bool": "BOOL",
    "uint8": "U8",
    "int8": "I8",
    "uint16": "U16",
    "int16": "I16",
    "uint32": "U32",
    "int32": "I32",
    "uint64": "U64",
    "int64": "I64",
    "float16": "F16",
    "bfloat16": "BF16",
    "float32": "F32",
    "float64": "F64",
    "complex64": "C64",
}
"""What a safetensors file calls each dtype that a checkpoint can hold."""
BLOCK = 2**18
"""Bytes that are written or read, and checked, at a time: few enough to stay in the cache of one core."""

BlockPosition = tuple[tuple[int, ...], tuple[int, ...]]
"""Where a block begins in a tensor, and its shape."""


def stored_dtype(name: str) -> np.dtype[np.generic]:
    """The dtype of the numbers as they are stored, the least byte first; of bfloat16 the bits."""
    return np.dtype("uint16" if name == "bfloat16" else name).newbyteorder("<")


def array_dtype(name: str) -> np.dtype[np.generic]:
    """The dtype in which NumPy has such a tensor: float32 for bfloat16, which NumPy lacks."""
    return np.dtype("float32" if name == "bfloat16" else name)


def blocks(shape: tuple[int, ...], item_bytes: int) -> Iterator[BlockPosition]:
    """Cuts a tensor into blocks whose bytes follow each other in C order."""
    if 0 in shape:
        return
    row_bytes = math.prod(shape[1:]) * item_bytes
    if not shape:
        yield (), ()
    elif row_bytes > BLOCK:
        inner = list(blocks(shape[1:], item_bytes))
        for row in range(shape[0]):
            yield from (((row, *offset), (1, *extent)) for offset, extent in inner)
    else:
        rows = BLOCK // row_bytes
        rest = (0,) * len(shape[1:])
        for first in range(0, shape[0], rows):
            yield (first, *rest), (min(rows, shape[0] - first), *shape[1:])


def block_index(offset: tuple[int, ...], extent: tuple[int, ...]) -> tuple[slice, ...]:
    """The index of a block in an array."""
    return tuple(slice(first, first + n) for first, n in zip(offset, extent, strict=True))


def to_stored(array: np.ndarray, dtype: str) -> np.ndarray:
    """The numbers of an array as they are stored.

    Raises:
        CheckpointError: It is said to be bfloat16, and has a number that is not.
    """
    if dtype != "bfloat16":
        return np.ascontiguousarray(array, stored_dtype(dtype))
    if array.dtype.name == dtype:  # the one of ml_dtypes
        return np.ascontiguousarray(array).view("<u2")
    bits = np.ascontiguousarray(array, "float32").view("uint32")
    if (bits & 0xFFFF).any():
        raise CheckpointError("it is said to be bfloat16, and has numbers that are not.")
    return (bits >> 16).astype("<u2")


def from_stored(stored: np.ndarray, dtype: str) -> np.ndarray:
    """Stored numbers as NumPy has them."""
    if dtype == "bfloat16":
        return (stored.astype("uint32") << 16).view("float32")
    return stored
