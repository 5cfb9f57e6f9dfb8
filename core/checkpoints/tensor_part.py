"""What a writer gives a checkpoint to hold."""

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
"""More are not known to every NumPy."""
_MAX_BYTES = 2**62


def is_possible_shape(shape: Sequence[int], item: int) -> bool:
    """Whether an array may have this shape, of numbers of so many bytes; an empty one is no exception."""
    return len(shape) <= MAX_AXES and math.prod(max(n, 1) for n in shape) * item < _MAX_BYTES


@dataclass(frozen=True)
class TensorPart:
    """A tensor, or the part of one that this writer has.

    Attributes:
        array: Its numbers, in any layout; must not change until they are written.
        dtype: Its own dtype where NumPy's differs: `bfloat16`, of float32 numbers; else left out.
        global_shape: Of the whole tensor; left out where this is all of it.
        offset: Of this part in the whole tensor, an index along each axis.

    Raises:
        CheckpointError: No checkpoint can hold it.
    """

    array: np.ndarray
    dtype: str = ""
    global_shape: tuple[int, ...] = ()
    offset: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        own, shape = self.array.dtype.name, self.array.shape
        for name, value in (("dtype", own), ("global_shape", shape), ("offset", (0,) * len(shape))):
            if not getattr(self, name):
                object.__setattr__(self, name, value)
        if self.dtype not in CODES or own not in (self.dtype, "float32"):
            raise CheckpointError(
                f"a checkpoint cannot hold numbers of {own} as {self.dtype}: it holds {', '.join(CODES)}."
            )
        if own != self.dtype != "bfloat16":
            raise CheckpointError(
                f"numbers of {own} are not stored as {self.dtype}: convert them before."
            )
        if not len(self.offset) == len(self.global_shape) == len(shape) <= MAX_AXES:
            raise CheckpointError(
                f"a part of shape {shape} at {self.offset} of {self.global_shape}: expected a number"
                f" for each axis, of which there may be {MAX_AXES}."
            )

    @property
    def nbytes(self) -> int:
        """Bytes that it takes in a checkpoint."""
        return self.array.size * stored_dtype(self.dtype).itemsize


@dataclass(frozen=True)
class StoredTensor:
    """What is known of a tensor of a checkpoint without reading it.

    Attributes:
        shape: Of the whole tensor, whoever wrote its parts.
        dtype: Its own; bfloat16 is read as float32.
        nbytes: Bytes that it takes.
        parts: How many it is stored in.
    """

    shape: tuple[int, ...]
    dtype: str
    nbytes: int
    parts: int

    @property
    def size(self) -> int:
        """How many numbers it has."""
        return math.prod(self.shape)
