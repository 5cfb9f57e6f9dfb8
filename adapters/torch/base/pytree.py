"""Nested tuples, lists and dicts of tensors: what a slice's inputs, targets and predictions are."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterator
from typing import Any

import torch

_HOLE = torch.empty(0)


def leaves(tree: Any) -> Iterator[torch.Tensor]:
    """The tensors of a tree, in order."""
    if isinstance(tree, torch.Tensor):
        yield tree
    elif isinstance(tree, dict):
        for part in tree.values():
            yield from leaves(part)
    elif isinstance(tree, tuple | list):
        for part in tree:
            yield from leaves(part)


def filled(tree: Any, tensors: Iterator[torch.Tensor]) -> Any:
    """A tree of the same structure, its tensors replaced in order."""
    if isinstance(tree, torch.Tensor):
        return next(tensors)
    if isinstance(tree, dict):
        return {name: filled(part, tensors) for name, part in tree.items()}
    if isinstance(tree, tuple | list):
        parts = [filled(part, tensors) for part in tree]
        return type(tree)(*parts) if hasattr(tree, "_fields") else type(tree)(parts)
    return tree


def emptied(tree: Any) -> Any:
    """A tree of the same structure that keeps no tensor alive."""
    return filled(tree, itertools.repeat(_HOLE))


def signature(tree: Any) -> Any:
    """What two trees have in common that the same operations serve: structure, shapes, types."""
    if isinstance(tree, torch.Tensor):
        return tree.shape, tree.dtype, tree.stride()
    if isinstance(tree, dict):
        return tuple((name, signature(part)) for name, part in tree.items())
    if isinstance(tree, tuple | list):
        return tuple(signature(part) for part in tree)
    return tree


def digest(signed: Any) -> int:
    """A number of 64 bits for a signature, the same in every process."""
    whole = hashlib.blake2b(repr(signed).encode(), digest_size=8).digest()
    return int.from_bytes(whole, "little", signed=True)


def rolled(tree: Any) -> Any:
    """The same with every row in the place of the next, the last in that of the first."""
    return filled(tree, (part.roll(1, 0) if part.dim() else part for part in leaves(tree)))
