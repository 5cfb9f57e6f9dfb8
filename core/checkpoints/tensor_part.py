"""Tensors of a checkpoint: the parts that a writer passes, and the description of a stored one."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from isotrain.core.checkpoints.dtypes import CODES, stored_dtype
from isotrain.core.errors import CheckpointError

Section = Mapping[str, "TensorPart"]
"""The tensors of one section, by name."""
MAX_AXES = 32
"""The maximum of NumPy before version 2."""
_MAX_BYTES = 2**62


def is_possible_shape(shape: Sequence[int], item: int) -> bool:
    """Whether an array may have this shape, with `item` bytes per element; also checked for empty ones."""
    return len(shape) <= MAX_AXES and math.prod(max(n, 1) for n in shape) * item < _MAX_BYTES


@dataclass(frozen=True)
class TensorPart:
    """A tensor, or a writer's shard of one.

    Attributes:
        array: Elements of the shard, in any memory layout; must not change until they are written.
        dtype: Dtype of the tensor; the array's when left out. `bfloat16` for float32 arrays.
        global_shape: Shape of the full tensor; the array's when left out.
        offset: Offset of the shard in the full tensor, an index per axis; zeros when left out.

    Raises:
        CheckpointError: The dtype or shape cannot be stored.
    """

    array: np.ndarray
    dtype: str = ""
    global_shape: tuple[int, ...] = ()
    offset: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        array_dtype, shape = self.array.dtype.name, self.array.shape
        defaults = {"dtype": array_dtype, "global_shape": shape, "offset": (0,) * len(shape)}
        for name, value in defaults.items():
            if not getattr(self, name):
                object.__setattr__(self, name, value)
        if self.dtype not in CODES or array_dtype not in (self.dtype, "float32"):
            raise CheckpointError(
                f"a checkpoint cannot hold numbers of {array_dtype} as {self.dtype}: it holds"
                f" {', '.join(CODES)}."
            )
        if array_dtype != self.dtype != "bfloat16":
            raise CheckpointError(
                f"numbers of {array_dtype} are not stored as {self.dtype}: convert them before."
            )
        if not len(self.offset) == len(self.global_shape) == len(shape) <= MAX_AXES:
            raise CheckpointError(
                f"a part of shape {shape} at {self.offset} of {self.global_shape}: expected a number"
                f" for each axis, of which there may be {MAX_AXES}."
            )

    @property
    def nbytes(self) -> int:
        """Size in a checkpoint, in bytes."""
        return self.array.size * stored_dtype(self.dtype).itemsize


@dataclass(frozen=True)
class StoredTensor:
    """Description of a tensor in a checkpoint.

    Attributes:
        shape: Shape of the full tensor.
        dtype: Stored dtype; bfloat16 is read as float32.
        nbytes: Stored size in bytes.
        parts: Number of shards that it is stored in.
    """

    shape: tuple[int, ...]
    dtype: str
    nbytes: int
    parts: int

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)
