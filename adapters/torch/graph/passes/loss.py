"""Passes that fuse casts of classes and the sum over samples into torch's cross-entropy."""

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
from isotrain.adapters.torch.loss.functional import NO_CLASS

_DEFAULTS = (None, None, None, 1, -100, 0.0)
"""Defaults of all arguments of `aten.cross_entropy_loss`; indexed as those (see `_REDUCTION`)."""
_REDUCTION, _IGNORE_INDEX = 3, 4
"""Indices of arguments of `aten.cross_entropy_loss`."""
_NONE, _SUM = 0, 2
"""Reductions, as torch numbers them."""
_EXACT_INTEGERS = {torch.float32: 2**24, torch.float64: 2**53}
"""Bound below which a dtype represents all integers exactly."""
_INTEGERS = {torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64}


def fuse_cross_entropy_mean(node: Node) -> bool:
    """Fuses a sum over per-sample cross-entropies into the operation's reduction."""
    if not is_call(node, aten.sum.default) or node.kwargs or len(node.args) > 1:
        return False
    losses: Any = node.args[0]
    if not is_only_used_by(losses, node) or not is_call(losses, aten.cross_entropy_loss.default):
        return False
    args = _all_arguments(losses)
    if args is None or args[_REDUCTION] != _NONE:
        return False
    args[_REDUCTION] = _SUM
    with node.graph.inserting_before(node):
        replace(node, call(node.graph, node, losses.target, args))
    return True


def skip_class_casts(node: Node) -> bool:
    """Removes a cast of integer classes to floating point and back.

    Only integers that are no valid class would be rounded, which is an error either way.
    """
    if not is_call(node, aten.cross_entropy_loss.default):
        return False
    if dtype_of(node.args[1]) != torch.int64:
        return False  # targets are probabilities
    args, scores = _all_arguments(node), shape_of(node.args[0]) or ()
    floats = _cast_source(node.args[1])
    integers = None if floats is None else _cast_source(floats)
    if args is None or integers is None or len(scores) < 2:
        return False
    if args[_IGNORE_INDEX] not in (_DEFAULTS[_IGNORE_INDEX], NO_CLASS):
        return False
    if dtype_of(integers) not in _INTEGERS or scores[1] > _EXACT_INTEGERS.get(dtype_of(floats), 0):
        return False
    with node.graph.inserting_before(node):
        classes = call(node.graph, node.args[1], aten.to.dtype, (integers, torch.int64))
    node.update_arg(1, integers if dtype_of(integers) == torch.int64 else classes)
    return True


def _all_arguments(node: Node) -> list[Any] | None:
    """Arguments with the defaults of omitted ones; None if some are passed by name."""
    return None if node.kwargs else [*node.args, *_DEFAULTS[len(node.args) :]]


def _cast_source(node: Any) -> Node | None:
    """Operand of a cast to another dtype; None if the node is anything else."""
    if not is_call(node, aten.to.dtype) or node.kwargs or any(node.args[2:]):
        return None
    source = node.args[0]
    return source if isinstance(source, Node) and "tensor_meta" in source.meta else None
