"""Weights of portable models: their names, those that layers update themselves, and frozen ones.

Imported by adapters only after `keras_backend.set_backend`.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Collection, Sequence
from typing import Any

import keras

from isotrain.adapters.keras import private as keras_private
from isotrain.plugin import SpecError


def moving_statistics(model: keras.Layer, per_replica: Collection[Any] = ()) -> list[Any]:
    """The floating-point weights that layers update in the forward pass, such as batch normalisation's.

    Frozen weights (`layer.trainable = False`) are not included: nothing updates them.

    Args:
        model: A Keras model.
        per_replica: Weights that each replica keeps for itself, which are left out.
    """
    layers = [each for each in keras_private.layers_of(model) if not _stands_still(each)]
    updated = {id(v) for layer in layers for v in keras_private.weights_updated_by(layer)}
    updated -= set(map(id, per_replica))
    return [
        variable
        for variable in model.non_trainable_variables
        if id(variable) in updated and keras.backend.is_float_dtype(variable.dtype)
    ]


def self_updating_weights(model: keras.Layer) -> list[Any]:
    """The weights that layers update themselves, of any dtype, seed states and frozen layers' included."""
    updated = {
        id(v)
        for layer in keras_private.layers_of(model)
        for v in keras_private.weights_updated_by(layer)
    }
    return [
        variable
        for variable in model.non_trainable_variables
        if id(variable) in updated or keras_private.is_seed(variable.path)
    ]


def _stands_still(layer: keras.Layer) -> bool:
    """Whether a layer is a frozen batch normalisation, whose moving statistics are not updated."""
    return isinstance(layer, keras.layers.BatchNormalization) and not layer.trainable


def canonical_names(variables: Sequence[Any]) -> list[str]:
    """Keras paths of variables, in order; `#1`, `#2`, ... is appended to repeated paths."""
    seen: dict[str, int] = {}
    names = []
    for variable in variables:
        path = variable.path
        count = seen.get(path, 0)
        seen[path] = count + 1
        names.append(path if count == 0 else f"{path}#{count}")
    return names


def freeze(model: keras.Layer, is_frozen: Callable[[str], bool]) -> Callable[[], None]:
    """Freezes weights by name, and each layer all of whose weights are frozen.

    A frozen layer is called in inference mode also during training: batch normalisation then uses its moving
    statistics and does not update them, and dropout inside of it is off.

    Returns:
        Function that undoes it.

    Raises:
        SpecError: Moving statistics are named whose layer is not frozen.
    """
    layers = keras_private.layers_of(model)
    before = [(each, each.trainable, vars(each).get("call")) for each in layers]
    variables = [*model.trainable_variables, *model.non_trainable_variables]
    names = canonical_names(variables)
    frozen = {id(v) for v, name in zip(variables, names, strict=True) if is_frozen(name)}
    frozen_layers = [layer for layer in layers if _is_in(frozen, layer)]
    were_trainable = [(each, each.trainable) for each in variables]

    def undo() -> None:
        for layer, was_trainable, call in sorted(before, key=lambda each: not each[1]):
            layer.trainable = was_trainable  # of what is inside too, which follows where it was not
            if call is not None:
                layer.call = call
            elif "call" in vars(layer):
                del layer.call
        for variable, was_trainable in were_trainable:
            variable.trainable = was_trainable

    for layer in frozen_layers:
        layer.trainable = False
        for inner in keras_private.layers_of(layer):
            _keep_in_inference(inner)
    for variable in variables:
        if id(variable) in frozen:
            variable.trainable = False
    updated = {id(v) for v in moving_statistics(model)}
    still_updated = [n for v, n in zip(variables, names, strict=True) if id(v) in frozen & updated]
    if still_updated:
        undo()
        raise SpecError(
            f"freeze: {', '.join(still_updated)}: a layer moves its statistics as long as it"
            " trains. Name its other weights too."
        )
    return undo


class Freezing:
    """Weights and layers of a Keras model that are frozen within a run."""

    def __init__(self, model: keras.Layer) -> None:
        self._model = model
        self._undo: Callable[[], None] = lambda: None
        self._names: Collection[str] = ()

    def set_frozen(self, names: Collection[str]) -> None:
        """Freezes exactly the weights of these names, besides those that were frozen at the start."""
        unlock_trainable(self._model)
        self._undo()
        try:
            self._undo = freeze(self._model, lambda name: name in names)
        except SpecError:
            self._undo = freeze(self._model, lambda name: name in self._names)
            raise
        finally:
            lock_trainable(self._model)
        self._names = names


def _keep_in_inference(layer: keras.Layer) -> None:
    """Wraps a layer's `call` so that it always runs with `training=False`."""
    call = layer.call
    if "training" not in inspect.signature(call).parameters:
        return

    @functools.wraps(call)
    def inference(*args: Any, **kwargs: Any) -> Any:
        return call(*args, **{**kwargs, "training": False})

    layer.call = inference


def _is_in(frozen: Collection[int], layer: keras.Layer) -> bool:
    """Whether a layer has trainable weights (else floating-point statistics) and all of them are frozen."""
    statistics = [v for v in layer.non_trainable_variables if keras.backend.is_float_dtype(v.dtype)]
    weights = layer.trainable_variables or statistics
    return bool(weights) and all(id(variable) in frozen for variable in weights)


def lock_trainable(model: Any) -> None:
    """Makes every later change of `trainable` in a Keras model raise a `SpecError`, until it is unlocked."""
    if isinstance(model, keras.Layer):
        keras_private.watch_trainable(_with_trainable(model), _refuse_change)


def unlock_trainable(model: Any) -> None:
    """Allows `trainable` to change again, after the run."""
    if isinstance(model, keras.Layer):
        keras_private.unwatch_trainable(_with_trainable(model))


def _with_trainable(model: keras.Layer) -> list[Any]:
    return [
        *keras_private.layers_of(model),
        *model.trainable_variables,
        *model.non_trainable_variables,
    ]


def _refuse_change(owner: Any) -> None:
    """Refuses a change of `trainable` of a layer or variable.

    Raises:
        SpecError: Always; says what to do instead.
    """
    name = getattr(owner, "path", None) or owner.name
    raise SpecError(
        f"trainable: expected that {name!r} stays trainable={owner.trainable} as long as its run goes on,"
        f" received {not owner.trainable}: optimizer, exchange and steps are made for the weights that were"
        " trained at the start. Freeze weights by `initial_weights.freeze` in the spec, or in the loop by"
        " session.freeze(patterns)."
    )
