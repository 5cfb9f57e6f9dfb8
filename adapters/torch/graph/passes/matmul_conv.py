"""Passes that fuse biases and padding into matrix products and convolutions, or call a product's kernel."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch.fx import Node

from isotrain.adapters.torch.graph.passes.exact import replace
from isotrain.adapters.torch.graph.passes.nodes import (
    aten,
    call,
    dtype_of,
    is_call,
    is_on_cpu,
    is_only_used_by,
    shape_of,
)

_CONVOLUTIONS = {aten.conv1d.default, aten.conv2d.default, aten.conv3d.default}
_COMPARED_ELEMENTS = 256
"""Elements of a product and of its gradients, at least, whose bits are compared."""
_COMPARED_SUMS = 16
"""Elements of a bias' gradient, at least, whose bits are compared."""
_MAX_MULTIPLICATIONS = 1 << 28
"""Multiplications of all products that are compared, at most. A bias takes little time beside larger ones."""


class _Biased(NamedTuple):
    """A matrix product and the bias that is added to it.

    Attributes:
        product: The product, `[*rows, *columns]`.
        bias: Bias `[*columns]`.
        left: Left factor `[*rows, *inner]`.
        right: Right factor `[*inner, *columns]`.
        contracted: Number of axes `inner`.
    """

    product: Node
    bias: Node
    left: Node
    right: Node
    contracted: int


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
    biased = _biased(node)
    if biased is None:
        return False
    _fuse(node, biased)
    return True


def fuse_matmul_bias_exactly(node: Node) -> bool:
    """Fuses the addition of a bias, on CPUs, where random factors of the same layouts give the same bits.

    Kernels that sum a long inner axis in blocks round otherwise with a bias: most elements differ.
    """
    biased = _biased(node)
    if biased is None or not is_on_cpu(node):
        return False
    layouts = tuple(
        (tuple(meta.shape), tuple(meta.stride), meta.dtype)
        for meta in (each.meta["tensor_meta"] for each in (biased.left, biased.right, biased.bias))
    )
    is_float = all(dtype.is_floating_point for _, _, dtype in layouts)
    if not is_float or any(0 in strides for _, strides, _ in layouts):  # of expanded tensors
        return False
    equation = biased.product.args[0] if is_call(biased.product, aten.einsum.default) else None
    settings = torch.get_num_threads(), torch.get_float32_matmul_precision()
    if not _has_equal_bits(layouts, equation, biased.contracted, settings):
        return False
    _fuse(node, biased)
    return True


def _biased(node: Node) -> _Biased | None:
    """The matrix product to which a node adds a bias; None for any other node."""
    if node.target != aten.add.Tensor or node.kwargs:
        return None
    product, bias = node.args
    if not is_only_used_by(product, node):
        return None
    factors = _factors(product)
    if factors is None:
        return None
    left, right, contracted = factors
    right_shape, bias_shape = shape_of(right), shape_of(bias)
    if right_shape is None or bias_shape is None or shape_of(left) is None:
        return None
    if bias_shape != right_shape[contracted:]:
        return None
    if len({dtype_of(n) for n in (left, right, bias)}) > 1:
        return None
    return _Biased(product, bias, left, right, contracted)


def _fuse(node: Node, biased: _Biased) -> None:
    """Replaces the addition of a bias by `addmm`."""
    right_shape, contracted = shape_of(biased.right) or (), biased.contracted
    inner, width = math.prod(right_shape[:contracted]), math.prod(right_shape[contracted:])
    with node.graph.inserting_before(node):
        args = (
            _reshaped(biased.bias, [width]),
            _reshaped(biased.left, [-1, inner]),
            _reshaped(biased.right, [inner, width]),
        )
        result = call(node.graph, node, aten.addmm.default, args)
        if len(shape_of(node) or ()) > 2:
            shape = list(shape_of(node) or ())
            result = call(node.graph, node, aten.reshape.default, (result, shape))
        replace(node, result)


@functools.lru_cache
@torch.inference_mode(False)  # graphs of evaluations are made without gradients
@torch.enable_grad()
@torch.autocast("cpu", enabled=False)
def _has_equal_bits(
    layouts: tuple[tuple[tuple[int, ...], tuple[int, ...], torch.dtype], ...],
    equation: str | None,
    contracted: int,
    settings: tuple[int, str],
) -> bool:
    """Whether `addmm` and an addition after the product give the same bits, and the same gradients.

    Args:
        layouts: Shape, strides and dtype of both factors and the bias.
        equation: Equation of the einsum that is the product; None: a `matmul`.
        contracted: Number of axes that the product sums over.
        settings: Number of torch's threads and its precision of products, on which kernels depend.
    """
    generator = torch.Generator().manual_seed(0)
    (left_shape, _, _), (right_shape, _, _), (columns, _, _) = layouts
    inner, width = math.prod(right_shape[:contracted]), math.prod(columns)
    shape = (*left_shape[: len(left_shape) - contracted], *columns)
    sizes = [math.prod(each) for each in (shape, left_shape, right_shape)]
    if not all(sizes):
        return False
    draws = max(math.ceil(_COMPARED_ELEMENTS / min(sizes)), math.ceil(_COMPARED_SUMS / width))
    if draws * sizes[0] * inner > _MAX_MULTIPLICATIONS:
        return False
    for _ in range(draws):
        left, right, bias = (
            torch.empty_strided(size, strides, dtype=dtype, device="cpu")
            .normal_(generator=generator)
            .requires_grad_()
            for size, strides, dtype in layouts
        )
        flat = bias.reshape(width), left.reshape(-1, inner), right.reshape(inner, width)
        product = torch.einsum(equation, left, right) if equation else torch.matmul(left, right)
        results = product + bias, torch.addmm(*flat).reshape(shape)
        weights = torch.empty_like(results[0]).normal_(generator=generator)
        gradients = [torch.autograd.grad(each, (left, right, bias), weights) for each in results]
        if not all(map(torch.equal, (results[0], *gradients[0]), (results[1], *gradients[1]))):
            return False
    return True


def einsum_as_bmm(node: Node) -> bool:
    """Replaces an einsum that is one matrix product by the `bmm` that it calls; changes no bit.

    `torch.einsum` reaches that kernel through some ten views, each of which costs time in both passes. The
    kernel gets operands of the same values, shapes and strides here. Axes of size 1 are left to `einsum`,
    which sorts them in another way.
    """
    if not is_call(node, aten.einsum.default) or shape_of(node) is None:
        return False
    factors = _factors(node)
    if factors is None:
        return False
    left, right, contracted = factors
    left_shape, right_shape = shape_of(left) or (), shape_of(right) or ()
    if min(left_shape + right_shape, default=0) < 2:
        return False
    rows, inner = math.prod(left_shape[:-contracted]), math.prod(right_shape[:contracted])
    with node.graph.inserting_before(node):
        operands = (
            call(node.graph, node, aten.reshape.default, (left, [1, rows, inner])),
            call(node.graph, node, aten.reshape.default, (right, [1, inner, -1])),
        )
        product = call(node.graph, node, aten.bmm.default, operands)
        shape = list(shape_of(node) or ())
        replace(node, call(node.graph, node, aten.reshape.default, (product, shape)))
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
