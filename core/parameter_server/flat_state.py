"""Flattened state and gradients of one replica, as sent in a parameter-server run."""

from __future__ import annotations

from typing import Any

from isotrain.core.contracts.backend.replica import Replica, StatePart, Tensor

WEIGHTS: tuple[StatePart, ...] = ("trainable",)
STATISTICS: tuple[StatePart, ...] = ("statistics",)


def read_parts(replica: Replica, *, static: tuple[StatePart, ...]) -> Tensor:
    """Reads these parts of the replica's state as one vector, 1-D."""
    return replica.read(static)


def write_parts(replica: Replica, vector: Tensor, *, static: tuple[StatePart, ...]) -> None:
    """Writes these parts of the replica's state from one vector, 1-D."""
    replica.write(static, vector)


def flat_update(
    replica: Replica, gradients: list[Tensor], before: Tensor, *, static: int
) -> Tensor:
    """Flattens gradients, and appends the changes of the moving statistics.

    Args:
        replica: Replica that has computed the gradients.
        gradients: Gradients of its trainable weights, each of its weight's shape.
        before: Weights and statistics before the step, 1-D.
        static: Number of statistics at the end of `before`.

    Returns:
        Vector, 1-D, of the length and dtype of `before`.
    """
    ops = replica.ops
    flat = [ops.reshape(ops.cast(gradient, before.dtype), (-1,)) for gradient in gradients]
    if static:
        old_statistics = before[before.shape[0] - static :]
        flat.append(ops.cast(replica.read(STATISTICS), before.dtype) - old_statistics)
    return ops.concatenate(flat)


def unflatten_gradients(
    replica: Replica, vector: Tensor, *, static: tuple[Any, ...]
) -> list[Tensor]:
    """Splits a vector, 1-D, into gradients.

    Args:
        replica: Replica that has the operations.
        vector: Flattened gradients.
        static: Pairs of shape and dtype, and the end of each gradient in the vector.
    """
    ops = replica.ops
    shapes, ends = static
    parts = ops.split(vector, ends[:-1]) if len(shapes) > 1 else [vector]
    return [
        ops.cast(ops.reshape(part, shape), dtype)
        for part, (shape, dtype) in zip(parts, shapes, strict=True)
    ]
