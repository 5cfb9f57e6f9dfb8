"""The pass that multiplies kernels by small images as matrices.

Keras keeps a kernel as `[*places, inputs, outputs]`, which as a matrix is what a product takes. A convolution
of torch takes another order, in which each kernel is copied in every step, and its gradient back. In the deep
layers of a network, where images are small and kernels large, that takes longer than all else.
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
    shaped,
)

_RANKS = {aten.conv1d.default: 1, aten.conv2d.default: 2, aten.conv3d.default: 3}
"""How many axes images have besides samples and channels."""
_ROWS = 1024
"""Places in all images of a slice up to which a product of as many rows takes less time."""


class _Convolution(NamedTuple):
    """A convolution that can be a product.

    Attributes:
        images: Channels second.
        kernel: As Keras keeps it.
        bias: Of each output; None for none.
        strides: Along each axis of images.
        padding: Zeros before and after the images, along each axis.
        dilation: From place to place of the kernel, along each axis.
        sizes: Of the images that it gives.
    """

    images: Node
    kernel: Node
    bias: Node | None
    strides: Sequence[int]
    padding: Sequence[int]
    dilation: Sequence[int]
    sizes: Sequence[int]


def small_conv_as_matmul(node: Node) -> bool:
    """Lets a product take the place of a convolution of small images by a large kernel."""
    found = _found(node)
    if found is None or not is_on_cpu(node) or not _is_worth_it(found, node):
        return False
    graph, rank = node.graph, len(found.sizes)
    *places, inputs, outputs = shape_of(found.kernel) or ()
    with graph.inserting_before(node):
        rows = call(
            graph,
            node,
            aten.reshape.default,
            (_seen(found, node), [-1, math.prod(places) * inputs]),
        )
        matrix = [math.prod(places) * inputs, outputs]
        kernel = call(graph, node, aten.reshape.default, (found.kernel, matrix))
        product = (
            call(graph, node, aten.mm.default, (rows, kernel))
            if found.bias is None
            else call(graph, node, aten.addmm.default, (found.bias, rows, kernel))
        )
        last = [*(shape_of(node) or ())[:1], *found.sizes, outputs]
        result = shaped(call(graph, node, aten.reshape.default, (product, last)), last)
        axes = [0, rank + 1, *range(1, rank + 1)]
        replace(node, call(graph, node, aten.permute.default, (result, axes)))
    return True


def _found(node: Node) -> _Convolution | None:
    """A convolution over all channels, by a kernel in the order of Keras."""
    rank = _RANKS.get(node.target) if node.op == "call_function" else None
    if rank is None or node.kwargs:
        return None
    defaults = (None, [1], [0], [1], 1)
    given: tuple[Any, ...] = (*node.args, *defaults[len(node.args) - 2 :])
    images, weight, bias, *steps, groups = given
    kernel = _as_kept(weight, rank)
    if kernel is None or groups != 1:
        return None
    strides, padding, dilation = ([*each] * (rank // len(each)) for each in steps)
    sizes = (shape_of(node) or ())[2:]
    return _Convolution(_uncopied(images), kernel, bias, strides, padding, dilation, sizes)


def _is_worth_it(found: _Convolution, node: Node) -> bool:
    """Whether its images are few and small, and for several places of a kernel fewer than its outputs."""
    *places, _, outputs = shape_of(found.kernel) or ()
    rows = math.prod((shape_of(node) or ())[:1]) * math.prod(found.sizes)
    return rows <= (_ROWS if math.prod(places) == 1 else min(_ROWS, outputs))


def _seen(found: _Convolution, node: Node) -> Node:
    """What is seen from each place of an image by each place of the kernel; channels last."""
    graph, rank = node.graph, len(found.sizes)
    images = call(graph, node, aten.permute.default, (found.images, [0, *range(2, rank + 2), 1]))
    if any(found.padding):
        widths = [width for each in reversed(found.padding) for width in (each, each)]
        images = call(graph, node, aten.constant_pad_nd.default, (images, [0, 0, *widths]))
    places = (shape_of(found.kernel) or ())[:-2]
    parts = [_part(found, images, place) for place in itertools.product(*map(range, places))]
    return parts[0] if len(parts) == 1 else call(graph, node, aten.cat.default, (parts, -1))


def _part(found: _Convolution, images: Node, place: Sequence[int]) -> Node:
    """What one place of the kernel sees: every so many places from one on, along each axis."""
    part = images
    steps = zip(place, found.dilation, found.strides, found.sizes, strict=True)
    for axis, (index, dilation, stride, size) in enumerate(steps, start=1):
        start = index * dilation
        args = (part, axis, start, start + stride * (size - 1) + 1, stride)
        part = call(images.graph, images, aten.slice.Tensor, args)
    return part


def _as_kept(weight: Any, rank: int) -> Node | None:
    """The kernel as Keras keeps it, of which a convolution gets a copy in another order."""
    turned = _uncopied(weight)
    axes = [rank + 1, rank, *range(rank)]
    is_turned = is_call(turned, aten.permute.default) and list(turned.args[1]) == axes
    return turned.args[0] if is_turned and turned.args[0].op == "placeholder" else None


def _uncopied(node: Any) -> Any:
    """What was copied only to lie in another order."""
    while is_call(node, aten.contiguous.default):
        node = node.args[0]
    return node
