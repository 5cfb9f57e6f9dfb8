"""Lists of tensors as one vector, and back."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

from isotrain.plugin import Tensor, TensorFunctions


def joined(ops: TensorFunctions, tensors: Sequence[Tensor]) -> Tensor:
    """One new vector of all tensors, in the widest of their types."""
    return ops.concatenate([ops.reshape(tensor, (-1,)) for tensor in tensors])


def separated(ops: TensorFunctions, vector: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """Cuts a vector into tensors with the shapes and types of others."""
    ends = list(itertools.accumulate(math.prod(tensor.shape) for tensor in like))
    parts = ops.split(vector, ends[:-1]) if len(like) > 1 else [vector]
    return [
        ops.cast(ops.reshape(part, tensor.shape), tensor.dtype)
        for part, tensor in zip(parts, like, strict=True)
    ]
