"""State and gradients of one replica as vectors: what travels in a parameter-server run."""

from __future__ import annotations

from typing import Any

from isotrain.core.contracts.replica import Replica, StatePart, Tensor

WEIGHTS: tuple[StatePart, ...] = ("trainable",)
STATISTICS: tuple[StatePart, ...] = ("statistics",)


def read_parts(replica: Replica, *, static: tuple[StatePart, ...]) -> Tensor:
    """The replica's state of some parts."""
    return replica.read(static)


def write_parts(replica: Replica, vector: Tensor, *, static: tuple[StatePart, ...]) -> None:
    """Sets it."""
    replica.write(static, vector)


def change(replica: Replica, gradients: list[Tensor], before: Tensor, *, static: int) -> Tensor:
    """Gradients in one vector, and behind them by how much the moving statistics changed.

    Args:
        replica: After it has computed the gradients.
        gradients: Of its trainable weights.
        before: Weights and statistics that it began with.
        static: How many of these numbers are statistics.
    """
    ops = replica.ops
    flat = [ops.reshape(ops.cast(gradient, before.dtype), (-1,)) for gradient in gradients]
    if static:
        begun = before[before.shape[0] - static :]
        flat.append(ops.cast(replica.read(STATISTICS), before.dtype) - begun)
    return ops.concatenate(flat)


def separated(replica: Replica, vector: Tensor, *, static: tuple[Any, ...]) -> list[Tensor]:
    """Cuts a vector into gradients: `static` has the shapes and types, and where each ends."""
    ops = replica.ops
    kinds, ends = static
    parts = ops.split(vector, ends[:-1]) if len(kinds) > 1 else [vector]
    return [
        ops.cast(ops.reshape(part, shape), dtype)
        for part, (shape, dtype) in zip(parts, kinds, strict=True)
    ]
