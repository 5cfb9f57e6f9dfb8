"""Computations that steps and strategies share: flattening, and means over all replicas."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from isotrain.core.contracts.backend.replica import Replica, StatePart, Tensor, TensorFunctions

if TYPE_CHECKING:
    from isotrain.core.data.batch import Batch


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


def squared_norm(replica: Replica, gradients: Sequence[Tensor]) -> Tensor:
    """Squared norm of gradients of any shapes, shape `[1, 1]`; not finite if one of them is not. Local."""
    column = replica.ops.reshape(flatten(replica.ops, gradients), (-1, 1))
    return replica.ops.transpose(column) @ column


def slice_weights(batch: Batch) -> list[float]:
    """Weight of each local replica: its fraction of the global batch, times the number of replicas."""
    return [sum(micro_batch.weight for micro_batch in slices) for slices in batch.slices]


def average_state(
    replica: Replica, parts: Sequence[StatePart], weight: Tensor | None = None
) -> None:
    """Replaces state by its weighted mean over all replicas. Collective.

    Args:
        replica: The replica that runs this computation.
        parts: Kinds of state to average.
        weight: Weight of this replica, a scalar; the mean over all replicas is 1. None for 1.
    """
    vector = replica.read(parts)
    if vector.shape[0] == 0:
        return
    if weight is not None:
        vector = vector * replica.ops.cast(weight, vector.dtype)
    replica.write(parts, replica.all_reduce(vector, "mean"))


def average_gradients(
    replica: Replica,
    gradients: Sequence[Tensor],
    weight: Tensor | None = None,
    *,
    mean: Callable[[Tensor], Tensor] | None = None,
    static: StatePart = "statistics",
) -> list[Tensor]:
    """Mean gradients over all replicas; replaces the moving statistics by their mean. Collective.

    All are sent as one vector.

    Args:
        replica: The replica that runs this computation.
        gradients: Local gradients, of any shapes.
        weight: Weight of this replica, a scalar, for its statistics; None for 1.
        mean: Function that averages a vector over all replicas; None: an all-reduce.
        static: Part of the state with the moving statistics.
    """
    ops = replica.ops
    statistics = replica.read((static,))
    if weight is not None:
        statistics = statistics * ops.cast(weight, statistics.dtype)
    tensors = [*gradients, statistics] if statistics.shape[0] else [*gradients]
    vector = flatten(ops, tensors)
    means = unflatten(ops, mean(vector) if mean else replica.all_reduce(vector, "mean"), tensors)
    if statistics.shape[0]:
        replica.write((static,), means.pop())
    return means
