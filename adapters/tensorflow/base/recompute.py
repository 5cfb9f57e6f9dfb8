"""What is computed again in the backward pass on TensorFlow, so that nothing of it is kept."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

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
"""Operations that count as stateful, and may well be made twice."""


class TraceOrder:
    """Has what is traced in one graph happen one after the other, also where nothing needs what is before."""

    def __init__(self) -> None:
        """Has noted nothing."""
        self._graph: Any = None
        self._noted: list[tf.Tensor] = []

    def after(self, awaited: Sequence[tf.Tensor], tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """The values of tensors once all others are there, and what was noted last in this graph."""
        noted = self._noted if self._graph is tf.compat.v1.get_default_graph() else []
        return _after([*awaited, *noted], tensors)

    def note(self, tensors: Sequence[tf.Tensor]) -> None:
        """Has what comes next wait for these."""
        self._graph = tf.compat.v1.get_default_graph()
        self._noted = _firsts(tensors)


def recomputed(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function that a backward pass computes again; it is traced within a `tf.function`."""
    again = recomputed_in_order(function, TraceOrder())

    def call(*tensors: Any) -> Any:
        before = operations()
        results = again(*tensors)
        if found := unrepeatable_operations(before):
            raise SpecError(
                f"recompute: {function.__name__} has the operation {found}, which draws, assigns or"
                " exchanges, or is a function of which nobody can tell; computed again, it would do so a"
                " second time. Leave it out."
            )
        return results

    return call


def recomputed_in_order(
    function: Callable[..., Any], turns: TraceOrder, late: int = 0
) -> Callable[..., Any]:
    """As `tf.recompute_grad`, but for how it waits: an optimizer of graphs folds that away.

    Args:
        function: Of tensors.
        turns: In which it is computed again.
        late: So many of the first tensors it is given once the others are there, and it is its turn.
    """

    @tf.custom_gradient
    def call(*tensors: Any) -> Any:
        first = turns.after(tensors[late:], tensors[:late]) if late else []

        def backward(*upstream: Any, variables: Any = None) -> Any:
            again = turns.after(upstream, tensors)
            sources = [*again, *(variables or ())]
            with tf.GradientTape() as tape:
                tape.watch(sources)
                results = function(*again)
            found = tape.gradient(results, sources, upstream, tf.UnconnectedGradients.ZERO)
            found = _after(found, found)  # what was computed again is let go before more is
            turns.note(found)
            own, others = found[: len(again)], found[len(again) :]
            return own if variables is None else (own, others)

        return function(*first, *tensors[late:]), backward

    return call


def _after(awaited: Sequence[tf.Tensor], tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    """The values of tensors once all others are there, in a way of which no optimizer knows what it gives."""
    firsts = _firsts(awaited)
    if not firsts:
        return list(tensors)
    nothing = tf.add_n([tf.reduce_sum(tf.cast(first > np.inf, tf.float32)) for first in firsts])
    return [
        each + tf.cast(nothing, each.dtype) if each.dtype.is_floating else each for each in tensors
    ]


def _firsts(tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    """The first number of each that has any of floating point, or none."""
    return [tf.reshape(each, [-1])[:1] for each in tensors if each.dtype.is_floating]


def operations() -> int:
    """How many there are in the graph that is traced."""
    return len(tf.compat.v1.get_default_graph().get_operations())


def unrepeatable_operations(before: int) -> str | None:
    """Which of the operations that were traced since would be another, or happen twice, when computed again.

    One that draws, assigns or exchanges.

    Args:
        before: How many there were.
    """
    for operation in tf.compat.v1.get_default_graph().get_operations()[before:]:
        if operation.op_def.is_stateful and operation.type not in _HARMLESS:
            return str(operation.type)
    return None


def recompute(model: tf.Module, spec: TrainingSpec) -> None:
    """Has modules inside of one computed again in the backward pass, where the spec asks for it.

    Raises:
        SpecError: The spec names a module that is not there.
    """
    modules = dict(named_modules(model))
    for name in spec.recomputed(modules, "."):
        recompute_module(name, modules[name])


def recompute_module(name: str, module: tf.Module) -> None:
    """Has one computed again in the backward pass; the name is for messages."""
    override_call(module, _recomputed(name, type(module).__call__))


def override_call(module: tf.Module, call: Callable[..., Any]) -> None:
    """Has a module computed by a function of it and what it is called with."""
    own = type(module)
    module.__class__ = type(own.__name__, (own,), {"__call__": call})


def _recomputed(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
    """Gives tensors by position, also those of keywords: no gradient comes back to others."""

    @functools.wraps(call)  # by whose arguments it is told whether it trains
    def call_or_recompute(module: tf.Module, *args: Any, **kwargs: Any) -> Any:
        given = tf.nest.flatten((args, kwargs))
        places = [place for place, each in enumerate(given) if tf.is_tensor(each)]

        def compute(*tensors: Any) -> Any:
            filled = list(given)
            for place, tensor in zip(places, tensors, strict=True):
                filled[place] = tensor
            own_args, own_kwargs = tf.nest.pack_sequence_as((args, kwargs), filled)
            return call(module, *own_args, **own_kwargs)

        compute.__name__ = name
        return recomputed(compute)(*(given[place] for place in places))

    return call_or_recompute
