"""Activation recomputation (gradient checkpointing: Chen et al. 2016, arXiv 1604.06174) on TensorFlow."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from isotrain.adapters.common.sample_draws import repeatable
from isotrain.adapters.tensorflow.base.modules import named_modules
from isotrain.plugin import SpecError, TrainingSpec

_HARMLESS = {
    "ReadVariableOp",
    "VarHandleOp",
    "ResourceGather",
    "ResourceGatherNd",
    "Assert",
    "PrintV2",
}
"""Stateful operations that may be repeated."""


class TraceOrder:
    """Forces an execution order on what is traced in one graph, by added data dependencies."""

    def __init__(self) -> None:
        """Begins with no tensors to wait for."""
        self._graph: Any = None
        self._pending: list[tf.Tensor] = []

    def after(self, awaited: Sequence[tf.Tensor], tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Values of `tensors`, any shapes, that wait for `awaited` and for the tensors noted last."""
        pending = self._pending if self._graph is tf.compat.v1.get_default_graph() else []
        return _after([*awaited, *pending], tensors)

    def note(self, tensors: Sequence[tf.Tensor]) -> None:
        """Makes the next call of `after` in this graph wait for these tensors, of any shapes."""
        self._graph = tf.compat.v1.get_default_graph()
        self._pending = _firsts(tensors)


def recomputed(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps a function so that the backward pass recomputes it; traced within a `tf.function`."""
    recomputing = recomputed_in_order(function, TraceOrder())

    def call(*tensors: Any) -> Any:
        before = operations()
        results = recomputing(*tensors)
        if operation := unrepeatable_operations(before):
            raise SpecError(
                f"recompute: {function.__name__} has the operation {operation}, which draws random numbers,"
                " assigns or communicates (or is a function that may do so) and would do it again when"
                " recomputed. Leave it out of recompute."
            )
        return results

    return call


def recomputed_in_order(
    function: Callable[..., Any], turns: TraceOrder, late: int = 0
) -> Callable[..., Any]:
    """Recomputation as by `tf.recompute_grad`, but it waits by a dependency that Grappler cannot fold away.

    Args:
        function: Function of tensors.
        turns: Order in which recomputations run.
        late: Number of leading arguments that are only passed on once the other ones are computed and it
            is the function's turn.
    """

    @tf.custom_gradient
    def call(*tensors: Any) -> Any:
        compute = repeatable(function)
        first = turns.after(tensors[late:], tensors[:late]) if late else []

        def backward(*upstream: Any, variables: Any = None) -> Any:
            again = turns.after(upstream, tensors)
            sources = [*again, *(variables or ())]
            with tf.GradientTape() as tape:
                tape.watch(sources)
                results = compute(*again)
            gradients = tape.gradient(results, sources, upstream, tf.UnconnectedGradients.ZERO)
            # Frees recomputed activations before the next recomputation.
            gradients = _after(gradients, gradients)
            turns.note(gradients)
            of_tensors, of_variables = gradients[: len(again)], gradients[len(again) :]
            return of_tensors if variables is None else (of_tensors, of_variables)

        return compute(*first, *tensors[late:]), backward

    return call


def _after(awaited: Sequence[tf.Tensor], tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    """Tensors of any shape once all awaited ones are computed, by an addition that Grappler cannot fold."""
    firsts = _firsts(awaited)
    if not firsts:
        return list(tensors)
    nothing = tf.add_n([tf.reduce_sum(tf.cast(first > np.inf, tf.float32)) for first in firsts])
    return [
        each + tf.cast(nothing, each.dtype) if each.dtype.is_floating else each for each in tensors
    ]


def _firsts(tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    """The first element of each tensor of floating point, shape `[1]`; `[0]` of an empty one."""
    return [tf.reshape(each, [-1])[:1] for each in tensors if each.dtype.is_floating]


def operations() -> int:
    """Number of operations in the graph that is traced."""
    return len(tf.compat.v1.get_default_graph().get_operations())


def operations_since(before: int) -> list[tf.Operation]:
    """Operations traced since `operations()` had this value."""
    traced: list[tf.Operation] = tf.compat.v1.get_default_graph().get_operations()[before:]
    return traced


def unrepeatable_operations(before: int) -> str | None:
    """Type of the first operation, of those traced since, that cannot be repeated.

    An operation is unrepeatable if it is stateful: it draws random numbers, assigns or communicates.

    Args:
        before: Value of `operations()` at the start.
    """
    for operation in operations_since(before):
        if operation.op_def.is_stateful and operation.type not in _HARMLESS:
            return str(operation.type)
    return None


def recompute(model: tf.Module, spec: TrainingSpec) -> None:
    """Makes the backward pass recompute the submodules that the spec names.

    Raises:
        SpecError: The model has no module of that name.
    """
    modules = dict(named_modules(model))
    for name in spec.recomputed(modules, "."):
        recompute_module(name, modules[name])


def recompute_module(name: str, module: tf.Module) -> None:
    """Makes the backward pass recompute a module; the name is for messages."""
    override_call(module, _recomputed(name, type(module).__call__))


def override_call(module: tf.Module, call: Callable[..., Any]) -> None:
    """Replaces a module's `__call__` by a function of the module and the call's arguments."""
    cls = type(module)
    module.__class__ = type(cls.__name__, (cls,), {"__call__": call})


def _recomputed(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
    """Passes all tensors, also those of keywords, by position: gradients flow to positional ones only."""

    @functools.wraps(call)  # its signature tells whether it takes `training`
    def call_or_recompute(module: tf.Module, *args: Any, **kwargs: Any) -> Any:
        leaves = tf.nest.flatten((args, kwargs))
        indices = [index for index, leaf in enumerate(leaves) if tf.is_tensor(leaf)]

        def compute(*tensors: Any) -> Any:
            filled = list(leaves)
            for index, tensor in zip(indices, tensors, strict=True):
                filled[index] = tensor
            new_args, new_kwargs = tf.nest.pack_sequence_as((args, kwargs), filled)
            return call(module, *new_args, **new_kwargs)

        compute.__name__ = name
        return recomputed(compute)(*(leaves[index] for index in indices))

    return call_or_recompute
