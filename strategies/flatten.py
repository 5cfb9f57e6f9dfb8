"""Flattens lists of tensors to one vector, and back."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

from isotrain.plugin import Tensor, TensorFunctions


def flatten(ops: TensorFunctions, tensors: Sequence[Tensor]) -> Tensor:
    """One new vector of all elements, in the widest dtype of the tensors; their shapes may be any."""
    return ops.concatenate([ops.reshape(tensor, (-1,)) for tensor in tensors])


def unflatten(ops: TensorFunctions, vector: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """Splits a vector into tensors with the shapes and dtypes of `like`; the inverse of `flatten`."""
    ends = list(itertools.accumulate(math.prod(tensor.shape) for tensor in like))
    parts = ops.split(vector, ends[:-1]) if len(like) > 1 else [vector]
    return [
        ops.cast(ops.reshape(part, tensor.shape), tensor.dtype)
        for part, tensor in zip(parts, like, strict=True)
    ]
