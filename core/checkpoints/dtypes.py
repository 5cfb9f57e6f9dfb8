"""Dtypes of stored tensors, their safetensors codes, and conversion to and from stored bytes."""

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
"""Safetensors code of each dtype that a checkpoint can hold."""
BLOCK_BYTES = 2**18
"""Bytes that are read or written, and checksummed, at a time: few enough for the cache of one core."""

BlockPosition = tuple[tuple[int, ...], tuple[int, ...]]
"""Offset of a block in a tensor, and its shape: an integer per axis each."""


def stored_dtype(name: str) -> np.dtype[np.generic]:
    """The NumPy dtype of stored elements, little-endian; uint16 for the bits of bfloat16."""
    return np.dtype("uint16" if name == "bfloat16" else name).newbyteorder("<")


def array_dtype(name: str) -> np.dtype[np.generic]:
    """The NumPy dtype in which a tensor is read: float32 for bfloat16, which NumPy lacks."""
    return np.dtype("float32" if name == "bfloat16" else name)


def blocks(shape: tuple[int, ...], item_bytes: int) -> Iterator[BlockPosition]:
    """Splits a tensor into blocks of at most `BLOCK_BYTES` that are contiguous in C order."""
    if 0 in shape:
        return
    row_bytes = math.prod(shape[1:]) * item_bytes
    if not shape:
        yield (), ()
    elif row_bytes > BLOCK_BYTES:
        inner = list(blocks(shape[1:], item_bytes))
        for row in range(shape[0]):
            yield from (((row, *offset), (1, *extent)) for offset, extent in inner)
    else:
        rows = BLOCK_BYTES // row_bytes
        inner_offset = (0,) * len(shape[1:])
        for first in range(0, shape[0], rows):
            yield (first, *inner_offset), (min(rows, shape[0] - first), *shape[1:])


def block_index(offset: tuple[int, ...], extent: tuple[int, ...]) -> tuple[slice, ...]:
    """The index of a block in an array: a slice per axis."""
    return tuple(slice(first, first + n) for first, n in zip(offset, extent, strict=True))


def to_stored(array: np.ndarray, dtype: str) -> np.ndarray:
    """Converts an array to its stored form: contiguous, little-endian; uint16 for bfloat16.

    Args:
        array: Array of any shape; for bfloat16 of dtype float32 or ml_dtypes' bfloat16.
        dtype: Dtype to store.

    Raises:
        CheckpointError: The dtype is bfloat16, and a float32 element is not representable in it.
    """
    if dtype != "bfloat16":
        return np.ascontiguousarray(array, stored_dtype(dtype))
    if array.dtype.name == dtype:  # the one of ml_dtypes
        return np.ascontiguousarray(array).view("<u2")
    bits = np.ascontiguousarray(array, "float32").view("uint32")
    if (bits & 0xFFFF).any():
        raise CheckpointError("its dtype is bfloat16, and some of its float32 numbers are not.")
    return (bits >> 16).astype("<u2")


def from_stored(stored: np.ndarray, dtype: str) -> np.ndarray:
    """Converts stored elements of any shape to the dtype of `array_dtype`."""
    if dtype == "bfloat16":
        return (stored.astype("uint32") << 16).view("float32")
    return stored
