"""Passes that fuse biases and padding into matrix products and convolutions."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

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

_CONVOLUTIONS = {aten.conv1d.default, aten.conv2d.default, aten.conv3d.default}


def fuse_conv_bias(node: Node) -> bool:
    """Fuses the addition of a bias into the convolution before it."""
    if node.target != aten.add.Tensor or node.kwargs:
        return False
    permuted = node.args[0]
    if not is_only_used_by(permuted, node) or permuted.target != aten.permute.default:
        return False
    convolution, axes = permuted.args
    bias = _bias_vector(node.args[1], (shape_of(node) or (0,))[-1])
    channels_last = [0, *range(2, len(axes)), 1]
    if bias is None or list(axes) != channels_last or not _can_take_bias(convolution, permuted):
        return False
    old_args = convolution.args
    with node.graph.inserting_before(node):
        args = (old_args[0], old_args[1], bias, *old_args[3:])
        fused = call(node.graph, convolution, convolution.target, args)
        replace(node, call(node.graph, node, aten.permute.default, (fused, axes)))
    return True


def _bias_vector(bias: Any, width: int) -> Node | None:
    """Vector `[width]` that is reshaped to broadcast along the last axis; None for anything else."""
    if not is_call(bias, aten.reshape.default):
        return None
    vector = bias.args[0]
    shape = [1] * (len(bias.args[1]) - 1) + [width]
    return vector if list(bias.args[1]) == shape and shape_of(vector) == (width,) else None


def _can_take_bias(convolution: Any, user: Node) -> bool:
    if not is_only_used_by(convolution, user) or convolution.target not in _CONVOLUTIONS:
        return False
    return not convolution.kwargs and (len(convolution.args) < 3 or convolution.args[2] is None)


def fuse_conv_padding(node: Node) -> bool:
    """Fuses zero padding, if equal on both sides of each axis, into the convolution after it."""
    if node.target not in _CONVOLUTIONS or node.kwargs:
        return False
    user, padded = node, node.args[0]
    if is_only_used_by(padded, user) and is_call(padded, aten.contiguous.default):
        user, padded = padded, padded.args[0]
    if not is_only_used_by(padded, user) or not is_call(padded, aten.pad.default):
        return False
    rank = len(shape_of(padded) or ()) - 2
    widths = _symmetric_widths(padded, rank)
    if widths is None:
        return False
    defaults = (None, None, None, [1] * rank, [0] * rank)
    _, kernel, bias, stride, padding = (*node.args, *defaults[len(node.args) :])[:5]
    old_widths = list(padding) * (rank // len(padding))
    total = [old + added for old, added in zip(old_widths, widths, strict=True)]
    user.replace_input_with(padded, padded.args[0])
    if user is not node:
        user.meta = dict(padded.args[0].meta)
    node.args = (node.args[0], kernel, bias, stride, total, *node.args[5:])
    return True


def _symmetric_widths(padded: Node, rank: int) -> list[int] | None:
    """Number of zeros on both sides of each spatial axis; None if the padding is of another kind."""
    widths, rest = list(padded.args[1]), padded.args[2:]
    if padded.kwargs or rest[:1] not in ((), ("constant",)) or any(rest[1:]):
        return None
    if len(widths) > 2 * rank or widths[::2] != widths[1::2] or min(widths) < 0:
        return None
    one_sided = widths[::2] + [0] * (rank - len(widths) // 2)
    return one_sided[::-1]


def fuse_matmul_bias(node: Node) -> bool:
    """Fuses the addition of a bias into the matrix product before it (`addmm`)."""
    if node.target != aten.add.Tensor or node.kwargs:
        return False
    product, bias = node.args
    if not is_only_used_by(product, node):
        return False
    factors = _factors(product)
    if factors is None:
        return False
    left, right, contracted = factors
    right_shape, bias_shape = shape_of(right), shape_of(bias)
    if right_shape is None or bias_shape is None or shape_of(left) is None:
        return False
    if bias_shape != right_shape[contracted:]:
        return False
    if len({dtype_of(n) for n in (left, right, bias)}) > 1:
        return False
    inner, width = math.prod(right_shape[:contracted]), math.prod(bias_shape)
    with node.graph.inserting_before(node):
        args = (
            _reshaped(bias, [width]),
            _reshaped(left, [-1, inner]),
            _reshaped(right, [inner, width]),
        )
        result = call(node.graph, node, aten.addmm.default, args)
        if len(shape_of(node) or ()) > 2:
            shape = list(shape_of(node) or ())
            result = call(node.graph, node, aten.reshape.default, (result, shape))
        replace(node, result)
    return True


def _reshaped(node: Node, shape: Sequence[int]) -> Node:
    """Adds a reshape to fewer axes; the node itself if it has as many already."""
    if len(shape_of(node) or ()) == len(shape):
        return node
    return call(node.graph, node, aten.reshape.default, (node, list(shape)))


def _factors(product: Any) -> tuple[Node, Node, int] | None:
    """Left and right operand, and how many axes (last of the left, first of the right) are contracted."""
    if is_call(product, aten.matmul.default):
        left, right = product.args
        is_of_matrix = len(shape_of(right) or ()) == 2 and len(shape_of(left) or ()) >= 2
        return (left, right, 1) if is_of_matrix else None
    if is_call(product, aten.einsum.default) and len(product.args) == 2 and not product.kwargs:
        equation, factors = product.args
        contracted = _contracted_axes(equation) if len(factors) == 2 else 0
        return (*factors, contracted) if contracted else None
    return None


def _contracted_axes(equation: str) -> int:
    """Number of axes that an einsum such as `abc,cde->abde` sums over; 0 if it is not a matrix product."""
    terms, _, result = equation.replace(" ", "").partition("->")
    left, _, right = terms.partition(",")
    for count in range(1, min(len(left), len(right))):
        is_product = left[-count:] == right[:count] and left[:-count] + right[count:] == result
        if is_product and len(set(left + right[count:])) == len(left + right[count:]):
            return count
    return 0
