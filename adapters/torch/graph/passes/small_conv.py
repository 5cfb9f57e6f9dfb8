"""Pass that computes a convolution of small images by a large kernel as a matrix product (im2col).

Keras keeps a kernel as `[*positions, inputs, outputs]`, which is a matrix without a copy. Torch's convolution
takes another layout, so that each kernel is copied in every step, and its gradient back. In the deep layers
of a network, where images are small and kernels large, that takes longer than all else.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from torch.fx import Node

from isotrain.adapters.torch.graph.passes.exact import replace
from isotrain.adapters.torch.graph.passes.nodes import (
    aten,
    call,
    is_call,
    is_on_cpu,
    shape_of,
    with_shape,
)

_RANKS = {aten.conv1d.default: 1, aten.conv2d.default: 2, aten.conv3d.default: 3}
"""Number of spatial axes."""
_MAX_ROWS = 1024
"""Output positions in all images of a slice, up to which a matrix product takes less time."""


class _Convolution(NamedTuple):
    """A convolution that can be computed as a matrix product.

    Attributes:
        images: Images, shape `[samples, inputs, *sizes]`.
        kernel: Kernel in Keras' layout, shape `[*positions, inputs, outputs]`.
        bias: Bias, shape `[outputs]`; None for none.
        strides: Stride along each spatial axis.
        padding: Zeros before and after the images, along each spatial axis.
        dilation: Distance of kernel positions, along each spatial axis.
        sizes: Spatial sizes of the output.
    """

    images: Node
    kernel: Node
    bias: Node | None
    strides: Sequence[int]
    padding: Sequence[int]
    dilation: Sequence[int]
    sizes: Sequence[int]


def small_conv_as_matmul(node: Node) -> bool:
    """Replaces a convolution of small images by a large kernel, on CPUs, by a matrix product."""
    convolution = _match(node)
    if convolution is None or not is_on_cpu(node) or not _is_faster(convolution, node):
        return False
    graph, rank = node.graph, len(convolution.sizes)
    *positions, inputs, outputs = shape_of(convolution.kernel) or ()
    with graph.inserting_before(node):
        rows = call(
            graph,
            node,
            aten.reshape.default,
            (_patches(convolution, node), [-1, math.prod(positions) * inputs]),
        )
        matrix = [math.prod(positions) * inputs, outputs]
        kernel = call(graph, node, aten.reshape.default, (convolution.kernel, matrix))
        product = (
            call(graph, node, aten.mm.default, (rows, kernel))
            if convolution.bias is None
            else call(graph, node, aten.addmm.default, (convolution.bias, rows, kernel))
        )
        shape = [*(shape_of(node) or ())[:1], *convolution.sizes, outputs]
        result = with_shape(call(graph, node, aten.reshape.default, (product, shape)), shape)
        axes = [0, rank + 1, *range(1, rank + 1)]
        replace(node, call(graph, node, aten.permute.default, (result, axes)))
    return True


def _match(node: Node) -> _Convolution | None:
    """Matches a convolution with one group whose kernel is a Keras variable."""
    rank = _RANKS.get(node.target) if node.op == "call_function" else None
    if rank is None or node.kwargs:
        return None
    defaults = (None, [1], [0], [1], 1)
    arguments: tuple[Any, ...] = (*node.args, *defaults[len(node.args) - 2 :])
    images, weight, bias, *steps, groups = arguments
    kernel = _keras_kernel(weight, rank)
    if kernel is None or groups != 1:
        return None
    strides, padding, dilation = ([*each] * (rank // len(each)) for each in steps)
    sizes = (shape_of(node) or ())[2:]
    return _Convolution(_without_copies(images), kernel, bias, strides, padding, dilation, sizes)


def _is_faster(convolution: _Convolution, node: Node) -> bool:
    """Whether there are few output positions; for kernels larger than 1, fewer than output channels too."""
    *positions, _, outputs = shape_of(convolution.kernel) or ()
    rows = math.prod((shape_of(node) or ())[:1]) * math.prod(convolution.sizes)
    return rows <= (_MAX_ROWS if math.prod(positions) == 1 else min(_MAX_ROWS, outputs))


def _patches(convolution: _Convolution, node: Node) -> Node:
    """Image patches (im2col), shape `[samples, *sizes, positions * inputs]`."""
    graph, rank = node.graph, len(convolution.sizes)
    axes = [0, *range(2, rank + 2), 1]
    images = call(graph, node, aten.permute.default, (convolution.images, axes))
    if any(convolution.padding):
        widths = [width for each in reversed(convolution.padding) for width in (each, each)]
        images = call(graph, node, aten.constant_pad_nd.default, (images, [0, 0, *widths]))
    kernel_sizes = (shape_of(convolution.kernel) or ())[:-2]
    positions = itertools.product(*map(range, kernel_sizes))
    parts = [_strided_slice(convolution, images, position) for position in positions]
    return parts[0] if len(parts) == 1 else call(graph, node, aten.cat.default, (parts, -1))


def _strided_slice(convolution: _Convolution, images: Node, position: Sequence[int]) -> Node:
    """Pixels that one position of the kernel is multiplied by, shape `[samples, *sizes, inputs]`."""
    part = images
    steps = zip(position, convolution.dilation, convolution.strides, convolution.sizes, strict=True)
    for axis, (index, dilation, stride, size) in enumerate(steps, start=1):
        start = index * dilation
        args = (part, axis, start, start + stride * (size - 1) + 1, stride)
        part = call(images.graph, images, aten.slice.Tensor, args)
    return part


def _keras_kernel(weight: Any, rank: int) -> Node | None:
    """The variable of which a convolution gets a permuted copy; None if its kernel is anything else."""
    permuted = _without_copies(weight)
    axes = [rank + 1, rank, *range(rank)]
    is_permuted = is_call(permuted, aten.permute.default) and list(permuted.args[1]) == axes
    return permuted.args[0] if is_permuted and permuted.args[0].op == "placeholder" else None


def _without_copies(node: Any) -> Any:
    """Operand before any copies into contiguous memory."""
    while is_call(node, aten.contiguous.default):
        node = node.args[0]
    return node
