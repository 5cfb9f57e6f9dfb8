"""Passes that let other, faster operations compute the same up to rounding.

Keras keeps images with their channels last, and torch's operations want them second. So Keras permutes
before and after each of them, adds the bias where its own layout makes that slow, and copies for pooling.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from isotrain.adapters.torch.exact_passes import drop_unused, meta, replace

aten = torch.ops.aten
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
_CONVOLUTIONS = {aten.conv1d.default, aten.conv2d.default, aten.conv3d.default}


def rearranged(module: GraphModule) -> GraphModule | None:
    """A faster copy of a record that shares its tensors; None where there is nothing to gain."""
    graph = copy.deepcopy(module.graph)
    count = sum(
        each(node)
        for each in (_add_in_convolution, _add_in_product, _pool_as_it_lies)
        for node in list(graph.nodes)
        if node.op == "call_function"
    )
    while moved := sum(_cancel(node) or _sink(node) for node in list(graph.nodes)):
        count += moved
    if not count:
        return None
    drop_unused(graph)
    graph.lint()
    return GraphModule(module, graph)


def _is_only_used_by(node: Any, user: Node) -> bool:
    return isinstance(node, Node) and list(node.users) == [user]


def _call(graph: Graph, like: Node, target: Any, args: Sequence[Any]) -> Node:
    """An operation whose result is of the kind that another one gave."""
    node = graph.call_function(target, tuple(args))
    node.meta = dict(like.meta)
    return node


def _channels(bias: Any, width: int) -> Node | None:
    """The vector that a reshape spread over the last axis of images; None for anything else."""
    if not isinstance(bias, Node) or bias.target != aten.reshape.default:
        return None
    vector = bias.args[0]
    shape = [1] * (len(bias.args[1]) - 1) + [width]
    is_vector = meta(vector) is not None and tuple(meta(vector).shape) == (width,)
    return vector if list(bias.args[1]) == shape and is_vector else None


def _add_in_convolution(node: Node) -> bool:
    """Lets the convolution before it add a bias."""
    if node.target != aten.add.Tensor or node.kwargs:
        return False
    permuted = node.args[0]
    if not _is_only_used_by(permuted, node) or permuted.target != aten.permute.default:
        return False
    convolution, axes = permuted.args
    bias = _channels(node.args[1], meta(node).shape[-1])
    channels_last = [0, *range(2, len(axes)), 1]
    if bias is None or list(axes) != channels_last or not _takes_a_bias(convolution, permuted):
        return False
    given = convolution.args
    with node.graph.inserting_before(node):
        args = (given[0], given[1], bias, *given[3:])
        fused = _call(node.graph, convolution, convolution.target, args)
        replace(node, _call(node.graph, node, aten.permute.default, (fused, axes)))
    return True


def _takes_a_bias(convolution: Any, user: Node) -> bool:
    if not _is_only_used_by(convolution, user) or convolution.target not in _CONVOLUTIONS:
        return False
    return not convolution.kwargs and (len(convolution.args) < 3 or convolution.args[2] is None)


def _add_in_product(node: Node) -> bool:
    """Lets the product of matrices before it add a vector to every row."""
    if node.target != aten.add.Tensor or node.kwargs:
        return False
    product, bias = node.args
    if not _is_only_used_by(product, node) or product.target != aten.matmul.default:
        return False
    kinds = [meta(each) for each in (*product.args, bias) if isinstance(each, Node)]
    if None in kinds or [len(kind.shape) for kind in kinds] != [2, 2, 1]:
        return False
    if (
        bias.meta["tensor_meta"].shape[0] != meta(node).shape[1]
        or len({k.dtype for k in kinds}) > 1
    ):
        return False
    with node.graph.inserting_before(node):
        replace(node, _call(node.graph, node, aten.addmm.default, (bias, *product.args)))
    return True


def _pool_as_it_lies(node: Node) -> bool:
    """Pools images whose channels lie last, without a copy in which they lie second."""
    copied = node.args[0] if node.args else None
    if node.target not in _POOLS or not isinstance(copied, Node):
        return False
    if copied.target != aten.contiguous.default or copied.kwargs:
        return False
    source = copied.args[0]
    if not isinstance(source, Node) or source.target != aten.permute.default:
        return False
    node.update_arg(0, source)
    return True


def _is_inverse(one: Sequence[int], other: Sequence[int]) -> bool:
    return [one[axis] for axis in other] == list(range(len(one)))


def _cancel(node: Node) -> bool:
    """Removes a permutation of a permutation that gives the tensor back."""
    if node.target != aten.permute.default:
        return False
    source = node.args[0]
    if not isinstance(source, Node) or source.target != aten.permute.default:
        return False
    if not _is_inverse(source.args[1], node.args[1]):
        return False
    replace(node, source.args[0])
    return True


def _sink(node: Node) -> bool:
    """Permutes after an operation on single numbers rather than before it."""
    if node.target not in _POINTWISE or not node.args:
        return False
    permuted = node.args[0]
    if not _is_only_used_by(permuted, node) or permuted.target != aten.permute.default:
        return False
    with node.graph.inserting_before(node):
        args = (permuted.args[0], *node.args[1:])
        inner = node.graph.call_function(node.target, args, dict(node.kwargs))
        inner.meta = dict(permuted.args[0].meta)
        replace(node, _call(node.graph, node, aten.permute.default, (inner, permuted.args[1])))
    return True
