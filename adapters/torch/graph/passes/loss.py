"""Passes that let torch's cross-entropy of classes do what Keras does before and after it."""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Node

from isotrain.adapters.torch.graph.passes.exact import replace
from isotrain.adapters.torch.graph.passes.nodes import (
    aten,
    call,
    dtype_of,
    is_call,
    is_only_used_by,
    shape_of,
)

_DEFAULTS = (None, None, None, 1, -100, 0.0)
"""Of the operation: no weights, the mean, the class that is ignored, no smoothing."""
_REDUCTION, _IGNORED = 3, 4
_NONE, _SUM = 0, 2
"""Reductions, as torch numbers them."""
_EXACT_TO = {torch.float32: 2**24, torch.float64: 2**53}
"""Integers below it that a type of numbers has, all of them."""
_CLASSES = {torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64}


def fuse_cross_entropy_mean(node: Node) -> bool:
    """Lets the cross-entropy before it add up the values of the samples."""
    if not is_call(node, aten.sum.default) or node.kwargs or len(node.args) > 1:
        return False
    values: Any = node.args[0]
    if not is_only_used_by(values, node) or not is_call(values, aten.cross_entropy_loss.default):
        return False
    args = _all_arguments(values)
    if args is None or args[_REDUCTION] != _NONE:
        return False
    args[_REDUCTION] = _SUM
    with node.graph.inserting_before(node):
        replace(node, call(node.graph, node, values.target, args))
    return True


def skip_class_casts(node: Node) -> bool:
    """Takes whole numbers as classes without making them floating-point numbers in between.

    Those that this rounds are more than there are classes, which is an error either way.
    """
    if not is_call(node, aten.cross_entropy_loss.default):
        return False
    if dtype_of(node.args[1]) != torch.int64:
        return False  # they are probabilities
    args, scores = _all_arguments(node), shape_of(node.args[0]) or ()
    back = _converted(node.args[1])
    there = None if back is None else _converted(back)
    if args is None or there is None or args[_IGNORED] != _DEFAULTS[_IGNORED] or len(scores) < 2:
        return False
    if dtype_of(there) not in _CLASSES or scores[1] > _EXACT_TO.get(dtype_of(back), 0):
        return False
    with node.graph.inserting_before(node):
        classes = call(node.graph, node.args[1], aten.to.dtype, (there, torch.int64))
    node.update_arg(1, there if dtype_of(there) == torch.int64 else classes)
    return True


def _all_arguments(node: Node) -> list[Any] | None:
    """Also those that are left out; None where some have names."""
    return None if node.kwargs else [*node.args, *_DEFAULTS[len(node.args) :]]


def _converted(node: Any) -> Node | None:
    """What is converted to another type, and to nothing else; None where it is not."""
    if not is_call(node, aten.to.dtype) or node.kwargs or any(node.args[2:]):
        return None
    source = node.args[0]
    return source if isinstance(source, Node) and "tensor_meta" in source.meta else None
