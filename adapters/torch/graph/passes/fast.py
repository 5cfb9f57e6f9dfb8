"""Passes that replace operations by faster ones, with the same results up to rounding.

Keras keeps images with channels last, and torch's operations take channels second. So Keras permutes before
and after each operation, adds biases and pads in operations of their own, and copies before pooling and
convolutions.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence

from torch.fx import GraphModule, Node

from isotrain.adapters.torch.graph.passes.batch_norm import fuse_batch_norm
from isotrain.adapters.torch.graph.passes.exact import drop_unused, replace
from isotrain.adapters.torch.graph.passes.loss import fuse_cross_entropy_mean
from isotrain.adapters.torch.graph.passes.matmul_conv import (
    fuse_conv_bias,
    fuse_conv_padding,
    fuse_matmul_bias,
    fuse_matmul_bias_exactly,
)
from isotrain.adapters.torch.graph.passes.nodes import (
    aten,
    call,
    is_call,
    is_only_used_by,
    shape_of,
)
from isotrain.adapters.torch.graph.passes.small_conv import small_conv_as_matmul

_POOLS = {aten.max_pool2d.default, aten.avg_pool2d.default}
_POINTWISE = {
    aten.relu.default,
    aten.gelu.default,
    aten.silu.default,
    aten.tanh.default,
    aten.sigmoid.default,
    aten.elu.default,
    aten.leaky_relu.default,
    aten.clamp.default,
}


def optimized(module: GraphModule, *, exactly: bool = False) -> GraphModule | None:
    """Optimized copy of a graph that shares its tensors; None if no pass applies.

    Args:
        module: Traced graph.
        exactly: Whether only passes that change no bit take part.
    """
    graph = copy.deepcopy(module.graph)
    count = sum(
        each(node)
        for each in (_EXACT if exactly else _OPERATIONS)
        for node in list(graph.nodes)
        if node.op == "call_function"
    )
    layout = () if exactly else _LAYOUT
    while changes := sum(any(each(node) for each in layout) for node in list(graph.nodes)):
        count += changes
        drop_unused(graph)
    if not count:
        return None
    drop_unused(graph)
    graph.lint()
    return GraphModule(module, graph)


def _pool_without_copy(node: Node) -> bool:
    """Removes the contiguous copy of channels-last images before pooling."""
    if node.target not in _POOLS or not is_call(node.args[0], aten.contiguous.default):
        return False
    copied = node.args[0]
    source = copied.args[0]
    if copied.kwargs or not is_call(source, aten.permute.default, *_POINTWISE, aten.pad.default):
        return False
    node.update_arg(0, source)
    return True


def _attend_without_copy(node: Node) -> bool:
    """Removes contiguous copies of queries, keys and values before scaled dot-product attention."""
    if node.target != aten.scaled_dot_product_attention.default:
        return False
    copies = [n for n in node.args[:3] if is_call(n, aten.contiguous.default) and not n.kwargs]
    for each in copies:
        node.replace_input_with(each, each.args[0])
    return bool(copies)


def _copy_once(node: Node) -> bool:
    """Removes a copy whose only purpose is the next copy."""
    if node.target != aten.contiguous.default or not is_call(node.args[0], aten.contiguous.default):
        return False
    node.update_arg(0, node.args[0].args[0])
    return True


def _is_inverse(first: Sequence[int], second: Sequence[int]) -> bool:
    return [first[axis] for axis in second] == list(range(len(first)))


def _cancel_permutes(node: Node) -> bool:
    """Removes two permutations that are inverse to each other."""
    if node.target != aten.permute.default or not is_call(node.args[0], aten.permute.default):
        return False
    source = node.args[0]
    if not _is_inverse(source.args[1], node.args[1]):
        return False
    replace(node, source.args[0])
    return True


def _permute_after_pointwise(node: Node) -> bool:
    """Moves a permutation from before a pointwise operation to after it."""
    if node.target not in _POINTWISE or not node.args:
        return False
    permuted = node.args[0]
    if not is_only_used_by(permuted, node) or permuted.target != aten.permute.default:
        return False
    with node.graph.inserting_before(node):
        args = (permuted.args[0], *node.args[1:])
        inner = node.graph.call_function(node.target, args, dict(node.kwargs))
        inner.meta = dict(permuted.args[0].meta)
        replace(node, call(node.graph, node, aten.permute.default, (inner, permuted.args[1])))
    return True


def _permute_after_add(node: Node) -> bool:
    """Replaces the sum of two permuted tensors of one shape by the permuted sum."""
    if node.target != aten.add.Tensor or node.kwargs:
        return False
    a, b = node.args
    if not is_call(a, aten.permute.default) or not is_call(b, aten.permute.default):
        return False
    is_same_shape = shape_of(a.args[0]) == shape_of(b.args[0])
    if list(a.args[1]) != list(b.args[1]) or not is_same_shape:
        return False
    with node.graph.inserting_before(node):
        inner = call(node.graph, a.args[0], aten.add.Tensor, (a.args[0], b.args[0]))
        replace(node, call(node.graph, node, aten.permute.default, (inner, a.args[1])))
    return True


def _permute_before_pad(node: Node) -> bool:
    """Moves a permutation from after a padding to before it."""
    if node.target != aten.permute.default:
        return False
    padded, axes = node.args
    if not is_only_used_by(padded, node) or not is_call(padded, aten.pad.default) or padded.kwargs:
        return False
    pairs = _pairs(padded.args[1], len(axes))
    widths = [width for axis in reversed(axes) for width in pairs[axis]]
    with node.graph.inserting_before(node):
        inner = call(node.graph, node, aten.permute.default, (padded.args[0], axes))
        inner.meta = {}
        args = (inner, _trimmed(widths), *padded.args[2:])
        replace(node, call(node.graph, node, aten.pad.default, args))
    return True


def _pairs(widths: Sequence[int], rank: int) -> list[tuple[int, int]]:
    """Padding before and after each axis, in the order of the axes; torch counts them from the last."""
    pairs = [(widths[i], widths[i + 1]) for i in range(0, len(widths), 2)]
    return [*[(0, 0)] * (rank - len(pairs)), *reversed(pairs)]


def _trimmed(widths: list[int]) -> list[int]:
    """Widths without trailing axes that are not padded."""
    while widths[-2:] == [0, 0]:
        widths = widths[:-2]
    return widths


_OPERATIONS = (
    fuse_batch_norm,
    fuse_conv_bias,
    fuse_matmul_bias,
    _attend_without_copy,
    fuse_cross_entropy_mean,
    small_conv_as_matmul,
)
_EXACT = (fuse_matmul_bias_exactly,)
_LAYOUT = (
    _cancel_permutes,
    _permute_after_pointwise,
    _permute_after_add,
    _permute_before_pad,
    _copy_once,
    _pool_without_copy,
    fuse_conv_padding,
)
