"""Pass that fuses Keras' batch normalisation, some fifteen operations, into `aten.batch_norm`."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from torch.fx import Node

from isotrain.adapters.torch.graph.passes.exact import replace
from isotrain.adapters.torch.graph.passes.nodes import (
    aten,
    call,
    is_call,
    is_only_used_by,
    shape_of,
)


class _Match(NamedTuple):
    """A batch normalisation in the graph: its operands, and the operations to remove.

    Attributes:
        inputs: Inputs, shape `[samples, ..., channels]`.
        mean: Mean, shape `[channels]`.
        variance: Variance, shape `[channels]`.
        scale: Weight gamma, shape `[channels]`.
        shift: Weight beta, shape `[channels]`.
        epsilon: Constant that is added to the variance.
        steps: Matched operations, from the last to the first.
    """

    inputs: Node
    mean: Node
    variance: Node
    scale: Node
    shift: Node
    epsilon: float
    steps: list[Node]


def fuse_batch_norm(node: Node) -> bool:
    """Fuses a normalisation by the batch's statistics (training) or by the moving ones (inference)."""
    match = _match(node)
    if match is None:
        return False
    is_inference = match.mean.op == match.variance.op == "placeholder"
    if not is_inference and not _are_batch_statistics(match.inputs, match.mean, match.variance):
        return False
    before = match.steps[-1] if is_inference else match.mean.args[0]
    with node.graph.inserting_before(before):
        if is_inference:
            result = _batch_norm(match, node, match.mean, match.variance, 0.0)
        else:
            result = _batch_norm_by_batch(match, node)
    replace(node, result)
    for step in match.steps[1:]:
        node.graph.erase_node(step)
    return True


def _match(node: Node) -> _Match | None:
    """Matches `(x - mean) * (rsqrt(variance + epsilon) * scale) + shift`, as Keras computes it."""
    if not is_call(node, aten.add_.Tensor):
        return None
    product, shift = node.args
    if not is_call(product, aten.mul_.Tensor) or not is_only_used_by(product, node):
        return None
    centred, factor = product.args
    if not is_call(centred, aten.subtract.Tensor) or not is_call(factor, aten.mul.Tensor):
        return None
    root, scale = factor.args
    if not is_call(root, aten.rsqrt_.default) or not is_call(root.args[0], aten.add.Tensor):
        return None
    variance, epsilon = root.args[0].args
    steps = [node, product, centred, factor, root, root.args[0]]
    is_isolated = all(is_only_used_by(step, user) for step, user in _chain(steps))
    vectors = [_vector(each) for each in (centred.args[1], variance, scale, shift)]
    if not is_isolated or None in vectors or not isinstance(epsilon, float):
        return None
    mean, variance, scale, shift = vectors
    if not scale.op == shift.op == "placeholder":
        return None
    return _Match(centred.args[0], mean, variance, scale, shift, epsilon, steps)


def _chain(steps: list[Node]) -> list[tuple[Node, Node]]:
    """Pairs of a step and its user."""
    _, product, centred, factor, root, total = steps
    return [(centred, product), (factor, product), (root, factor), (total, root)]


def _vector(node: Any) -> Any:
    """Vector `[channels]` that is reshaped to broadcast along the last axis; None for anything else."""
    if not is_call(node, aten.reshape.default):
        return None
    shape = shape_of(node.args[0])
    new_shape = list(node.args[1])
    is_vector = shape is not None and len(shape) == 1 and new_shape[-1:] == list(shape)
    return node.args[0] if is_vector and math.prod(new_shape) == new_shape[-1] else None


def _are_batch_statistics(inputs: Node, mean: Node, variance: Node) -> bool:
    """Whether these are mean and variance of the inputs, over more than one number per channel."""
    if math.prod((shape_of(inputs) or (0,))[:-1]) < 2:
        return False
    if not is_call(mean, aten.squeeze.dims) or not is_call(variance, aten.squeeze.dims):
        return False
    first, difference = mean.args[0], variance.args[0]
    if not _is_mean_of(first, inputs) or not is_call(difference, aten.sub.Tensor):
        return False
    second, squared = difference.args
    if not is_call(second, aten.mean.dim) or not is_call(squared, aten.square.default):
        return False
    squares = second.args[0]
    is_of_squares = is_call(squares, aten.square.default) and squares.args[0] is inputs
    return is_of_squares and _is_mean_of(second, squares) and squared.args[0] is first


def _is_mean_of(node: Any, inputs: Node) -> bool:
    """Whether a node is the mean of the inputs over all axes but the last."""
    shape = shape_of(inputs)
    if not is_call(node, aten.mean.dim) or shape is None or len(node.args) != 3 or node.kwargs:
        return False
    source, axes, keepdim = node.args
    return source is inputs and list(axes) == list(range(len(shape) - 1)) and bool(keepdim)


def _batch_norm_by_batch(match: _Match, node: Node) -> Node:
    """Normalises by the batch's statistics, which torch writes into running statistics (zeros before)."""
    graph, shape = node.graph, shape_of(match.inputs) or ()
    samples = math.prod(shape[:-1])
    args = (match.scale, [shape[-1]])
    mean, unbiased = (call(graph, match.mean, aten.new_zeros.default, args) for _ in range(2))
    result = _batch_norm(match, node, mean, unbiased, 1.0)
    # torch's running variance is the unbiased one
    variance = call(graph, match.variance, aten.mul.Tensor, (unbiased, (samples - 1) / samples))
    match.mean.replace_all_uses_with(mean)
    match.variance.replace_all_uses_with(variance)
    return result


def _batch_norm(match: _Match, node: Node, mean: Node, variance: Node, momentum: float) -> Node:
    """Adds `aten.batch_norm`, which takes channels second, between permutations if there are spatial axes."""
    graph, rank = node.graph, len(shape_of(match.inputs) or ())
    inputs = match.inputs
    if rank > 2:
        axes = [0, rank - 1, *range(1, rank - 1)]
        inputs = call(graph, inputs, aten.permute.default, (inputs, axes))
    statistics = (match.scale, match.shift, mean, variance, momentum == 1.0, momentum)
    args = (inputs, *statistics, match.epsilon, False)
    result = call(graph, inputs, aten.batch_norm.default, args)
    if rank > 2:
        channels_last = [0, *range(2, rank), 1]
        result = call(graph, node, aten.permute.default, (result, channels_last))
    return result
