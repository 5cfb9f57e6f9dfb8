"""What is computed again in the backward pass on TensorFlow, so that nothing of it is kept."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

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


def recomputed(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function that a backward pass computes again; it is traced within a `tf.function`."""
    again = _again(function)

    def call(*tensors: Any) -> Any:
        before = len(tf.compat.v1.get_default_graph().get_operations())
        results = again(*tensors)
        _require_repeatable(function.__name__, before)
        return results

    return call


def _again(function: Callable[..., Any]) -> Callable[..., Any]:
    """As `tf.recompute_grad`, but for how it waits: an optimizer of graphs folds that away."""

    @tf.custom_gradient
    def call(*tensors: Any) -> Any:
        def backward(*upstream: Any, variables: Any = None) -> Any:
            late = _after(upstream, tensors)
            sources = [*late, *(variables or ())]
            with tf.GradientTape() as tape:
                tape.watch(sources)
                results = function(*late)
            found = tape.gradient(results, sources, upstream, tf.UnconnectedGradients.ZERO)
            found = _after(found, found)  # what was computed again is let go before more is
            own, others = found[: len(late)], found[len(late) :]
            return own if variables is None else (own, others)

        return function(*tensors), backward

    return call


def _after(awaited: Sequence[tf.Tensor], tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    """The values of tensors once all others are there, in a way of which no optimizer knows what it gives."""
    firsts = [tf.reshape(each, [-1])[:1] for each in awaited if each.dtype.is_floating]
    nothing = tf.add_n([tf.reduce_sum(tf.cast(first > np.inf, tf.float32)) for first in firsts])
    return [
        each + tf.cast(nothing, each.dtype) if each.dtype.is_floating else each for each in tensors
    ]


def _require_repeatable(name: str, before: int) -> None:
    """Refuses what would be another, or happen twice, when it is computed again.

    Raises:
        SpecError: Among the operations that were traced since is one that draws, assigns or exchanges.
    """
    for operation in tf.compat.v1.get_default_graph().get_operations()[before:]:
        if operation.op_def.is_stateful and operation.type not in _HARMLESS:
            raise SpecError(
                f"recompute: {name} has the operation {operation.type}, which draws, assigns or exchanges,"
                " or is a function of which nobody can tell; computed again, it would do so a second time."
                " Leave it out."
            )


def recompute(model: tf.Module, spec: TrainingSpec) -> None:
    """Has modules inside of one computed again in the backward pass, where the spec asks for it.

    Raises:
        SpecError: The spec names a module that is not there.
    """
    modules = dict(_named(model))
    for name in spec.recomputed(modules, "."):
        own = type(modules[name])
        call = {"__call__": _recomputed(name, own.__call__)}
        modules[name].__class__ = type(own.__name__, (own,), call)


def _named(module: tf.Module, start: str = "") -> Iterator[tuple[str, tf.Module]]:
    """The modules inside of one that can be called, at any depth, by the attributes that hold them."""
    for name, value in _attributes(vars(module), start):
        if callable(value):
            yield name, value
        yield from _named(value, f"{name}.")


def _attributes(values: Mapping[str, Any], start: str) -> Iterator[tuple[str, tf.Module]]:
    for name, value in values.items():
        if isinstance(value, tf.Module):
            yield f"{start}{name}", value
        elif isinstance(value, list | tuple):
            yield from _attributes({str(n): v for n, v in enumerate(value)}, f"{start}{name}.")
        elif isinstance(value, dict):
            yield from _attributes(value, f"{start}{name}.")


def _recomputed(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
    """Gives tensors by position, also those of keywords: no gradient comes back to others."""

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
