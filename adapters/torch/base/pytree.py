"""Pytrees: nested tuples, lists and dicts of tensors, such as inputs, targets and predictions."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterator
from typing import Any

import torch

_EMPTY = torch.empty(0)


def leaves(tree: Any) -> Iterator[torch.Tensor]:
    """Tensors of a pytree, any shapes, in order; other leaves are skipped."""
    if isinstance(tree, torch.Tensor):
        yield tree
    elif isinstance(tree, dict):
        for part in tree.values():
            yield from leaves(part)
    elif isinstance(tree, tuple | list):
        for part in tree:
            yield from leaves(part)


def filled(tree: Any, tensors: Iterator[torch.Tensor]) -> Any:
    """Pytree of the same structure, with its tensors replaced in order by others of any shapes."""
    if isinstance(tree, torch.Tensor):
        return next(tensors)
    if isinstance(tree, dict):
        return {name: filled(part, tensors) for name, part in tree.items()}
    if isinstance(tree, tuple | list):
        parts = [filled(part, tensors) for part in tree]
        return type(tree)(*parts) if hasattr(tree, "_fields") else type(tree)(parts)
    return tree


def row_count(tree: Any) -> int:
    """Size of the first axis of a pytree's first tensor, shape `[rows, ...]`."""
    return next(leaves(tree)).shape[0]


def emptied(tree: Any) -> Any:
    """Pytree of the same structure that keeps no tensor alive."""
    return filled(tree, itertools.repeat(_EMPTY))


def signature(tree: Any) -> Any:
    """Hashable structure, shapes, dtypes and strides of a pytree; equal ones can share a captured graph."""
    if isinstance(tree, torch.Tensor):
        return tree.shape, tree.dtype, tree.stride()
    if isinstance(tree, dict):
        return tuple((name, signature(part)) for name, part in tree.items())
    if isinstance(tree, tuple | list):
        parts = tuple(signature(part) for part in tree)
        return (type(tree).__name__, *parts) if hasattr(tree, "_fields") else parts
    return tree


def digest(value: Any) -> int:
    """BLAKE2b hash of a signature or name as a signed 64-bit integer, the same in every process."""
    hashed = hashlib.blake2b(repr(value).encode(), digest_size=8).digest()
    return int.from_bytes(hashed, "little", signed=True)


def rolled(tree: Any) -> Any:
    """Pytree with the rows (axis 0) of every tensor rotated by one; scalars unchanged."""
    return filled(tree, (part.roll(1, 0) if part.dim() else part for part in leaves(tree)))
