"""Passes that let other, faster operations compute the same up to rounding.

Keras keeps images with their channels last, and torch's operations want them second. So Keras permutes
before and after each of them, adds biases and pads by themselves, and copies before it pools or convolves.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence

from torch.fx import GraphModule, Node

from isotrain.adapters.torch.graph.passes.batch_norm import fuse_batch_norm
from isotrain.adapters.torch.graph.passes.exact import drop_unused, replace
from isotrain.adapters.torch.graph.passes.loss import (
    fuse_cross_entropy_mean,
    skip_class_casts,
)
from isotrain.adapters.torch.graph.passes.matmul_conv import (
    fuse_conv_bias,
    fuse_conv_padding,
    fuse_matmul_bias,
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


def optimized(module: GraphModule) -> GraphModule | None:
    """A faster copy of a record that shares its tensors; None where there is nothing to gain."""
    graph = copy.deepcopy(module.graph)
    count = sum(
        each(node)
        for each in _OPERATIONS
        for node in list(graph.nodes)
        if node.op == "call_function"
    )
    while moved := sum(any(each(node) for each in _LAYOUT) for node in list(graph.nodes)):
        count += moved
        drop_unused(graph)
    if not count:
        return None
    drop_unused(graph)
    graph.lint()
    return GraphModule(module, graph)


def _pool_as_it_lies(node: Node) -> bool:
    """Pools images whose channels lie last, without a copy in which they lie second."""
    if node.target not in _POOLS or not is_call(node.args[0], aten.contiguous.default):
        return False
    copied = node.args[0]
    source = copied.args[0]
    if copied.kwargs or not is_call(source, aten.permute.default, *_POINTWISE, aten.pad.default):
        return False
    node.update_arg(0, source)
    return True


def _attend_as_it_lies(node: Node) -> bool:
    """Attends to queries, keys and values without copies in which heads lie before places."""
    if node.target != aten.scaled_dot_product_attention.default:
        return False
    copied = [n for n in node.args[:3] if is_call(n, aten.contiguous.default) and not n.kwargs]
    for each in copied:
        node.replace_input_with(each, each.args[0])
    return bool(copied)


def _copy_once(node: Node) -> bool:
    """Copies into a layout without a copy into another before."""
    if node.target != aten.contiguous.default or not is_call(node.args[0], aten.contiguous.default):
        return False
    node.update_arg(0, node.args[0].args[0])
    return True


def _is_inverse(one: Sequence[int], other: Sequence[int]) -> bool:
    return [one[axis] for axis in other] == list(range(len(one)))


def _cancel(node: Node) -> bool:
    """Removes a permutation of a permutation that gives the tensor back."""
    if node.target != aten.permute.default or not is_call(node.args[0], aten.permute.default):
        return False
    source = node.args[0]
    if not _is_inverse(source.args[1], node.args[1]):
        return False
    replace(node, source.args[0])
    return True


def _sink(node: Node) -> bool:
    """Permutes after an operation on single numbers rather than before it."""
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


def _add_before(node: Node) -> bool:
    """Adds two tensors of one shape before both are permuted, rather than after it."""
    if node.target != aten.add.Tensor or node.kwargs:
        return False
    one, other = node.args
    if not is_call(one, aten.permute.default) or not is_call(other, aten.permute.default):
        return False
    same = shape_of(one.args[0]) == shape_of(other.args[0])
    if list(one.args[1]) != list(other.args[1]) or not same:
        return False
    with node.graph.inserting_before(node):
        inner = call(node.graph, one.args[0], aten.add.Tensor, (one.args[0], other.args[0]))
        replace(node, call(node.graph, node, aten.permute.default, (inner, one.args[1])))
    return True


def _pad_after(node: Node) -> bool:
    """Pads a permuted tensor rather than permuting a padded one."""
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
    """By how much each axis is padded before and after; torch counts axes from the last."""
    each = [(widths[i], widths[i + 1]) for i in range(0, len(widths), 2)]
    return [*[(0, 0)] * (rank - len(each)), *reversed(each)]


def _trimmed(widths: list[int]) -> list[int]:
    """Without the axes, at the end, that are not padded."""
    while widths[-2:] == [0, 0]:
        widths = widths[:-2]
    return widths


_OPERATIONS = (
    fuse_batch_norm,
    fuse_conv_bias,
    fuse_matmul_bias,
    _attend_as_it_lies,
    skip_class_casts,
    fuse_cross_entropy_mean,
    small_conv_as_matmul,
)
_LAYOUT = (
    _cancel,
    _sink,
    _add_before,
    _pad_after,
    _copy_once,
    _pool_as_it_lies,
    fuse_conv_padding,
)
