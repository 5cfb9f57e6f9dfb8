"""The pass that makes batch normalisation one operation: Keras computes it in some fifteen."""

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


class _Normalisation(NamedTuple):
    """What one is computed from, and the operations on numbers that become superfluous.

    Attributes:
        inputs: Channels last.
        mean: Of each channel.
        variance: Of each channel.
        scale: A weight.
        shift: A weight.
        epsilon: Added to the variance.
        steps: That change tensors in place, from the last to the first.
    """

    inputs: Node
    mean: Node
    variance: Node
    scale: Node
    shift: Node
    epsilon: float
    steps: list[Node]


def fuse_batch_norm(node: Node) -> bool:
    """Lets torch normalise, with the statistics of the batch or with given ones."""
    found = _found(node)
    if found is None:
        return False
    given = found.mean.op == found.variance.op == "placeholder"
    if not given and not _are_of(found.inputs, found.mean, found.variance):
        return False
    before = found.steps[-1] if given else found.mean.args[0]
    with node.graph.inserting_before(before):
        if given:
            result = _normalised(found, node, found.mean, found.variance, 0.0)
        else:
            result = _with_own_statistics(found, node)
    replace(node, result)
    for step in found.steps[1:]:
        node.graph.erase_node(step)
    return True


def _found(node: Node) -> _Normalisation | None:
    """`(x - mean) * (rsqrt(variance + epsilon) * scale) + shift`, as Keras writes it."""
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
    spread, epsilon = root.args[0].args
    steps = [node, product, centred, factor, root, root.args[0]]
    alone = all(is_only_used_by(own, user) for own, user in _chain(steps))
    vectors = [_vector(each) for each in (centred.args[1], spread, scale, shift)]
    if not alone or None in vectors or not isinstance(epsilon, float):
        return None
    mean, variance, scale, shift = vectors
    if not scale.op == shift.op == "placeholder":
        return None
    return _Normalisation(centred.args[0], mean, variance, scale, shift, epsilon, steps)


def _chain(steps: list[Node]) -> list[tuple[Node, Node]]:
    """Each step with the one that uses it."""
    _, product, centred, factor, root, total = steps
    return [(centred, product), (factor, product), (root, factor), (total, root)]


def _vector(node: Any) -> Any:
    """What was reshaped to stand beside the last axis of a tensor; None for anything else."""
    if not is_call(node, aten.reshape.default):
        return None
    shape = shape_of(node.args[0])
    wanted = list(node.args[1])
    is_vector = shape is not None and len(shape) == 1 and wanted[-1:] == list(shape)
    return node.args[0] if is_vector and math.prod(wanted) == wanted[-1] else None


def _are_of(inputs: Node, mean: Node, variance: Node) -> bool:
    """Whether these are the mean and the variance of the batch, of more than one number each."""
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
    """Whether it is the mean over all axes but the last."""
    shape = shape_of(inputs)
    if not is_call(node, aten.mean.dim) or shape is None or len(node.args) != 3 or node.kwargs:
        return False
    source, axes, keeps = node.args
    return source is inputs and list(axes) == list(range(len(shape) - 1)) and bool(keeps)


def _with_own_statistics(found: _Normalisation, node: Node) -> Node:
    """Normalises by the batch, whose statistics torch leaves in two tensors of zeros."""
    graph, shape = node.graph, shape_of(found.inputs) or ()
    samples = math.prod(shape[:-1])
    args = (found.scale, [shape[-1]])
    mean, spread = (call(graph, found.mean, aten.new_zeros.default, args) for _ in range(2))
    result = _normalised(found, node, mean, spread, 1.0)
    # torch's is the unbiased variance
    variance = call(graph, found.variance, aten.mul.Tensor, (spread, (samples - 1) / samples))
    found.mean.replace_all_uses_with(mean)
    found.variance.replace_all_uses_with(variance)
    return result


def _normalised(
    found: _Normalisation, node: Node, mean: Node, variance: Node, momentum: float
) -> Node:
    """The operation, between permutations for images; it takes channels second."""
    graph, rank = node.graph, len(shape_of(found.inputs) or ())
    inputs = found.inputs
    if rank > 2:
        axes = [0, rank - 1, *range(1, rank - 1)]
        inputs = call(graph, inputs, aten.permute.default, (inputs, axes))
    statistics = (found.scale, found.shift, mean, variance, momentum == 1.0, momentum)
    args = (inputs, *statistics, found.epsilon, False)
    result = call(graph, inputs, aten.batch_norm.default, args)
    if rank > 2:
        last = [0, *range(2, rank), 1]
        result = call(graph, node, aten.permute.default, (result, last))
    return result
