"""Variables that layers carry from step to step outside of the model's weights: stateful RNNs' states.

Imported by adapters only after `keras_backend.set_backend`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any

import keras

from isotrain.adapters.common.object_walk import is_user_class, iter_nested
from isotrain.adapters.keras import model as keras_model
from isotrain.adapters.keras import private as keras_private


def carried_variables(model: keras.Layer) -> dict[str, Any]:
    """Keras variables in layers' attributes that are not among the model's weights, by canonical name."""
    weights = {id(variable) for variable in model.variables}
    variables = distinct(v for _, v in carried(model, keras.Variable) if id(v) not in weights)
    return dict(zip(keras_model.canonical_names(variables), variables, strict=True))


def distinct(variables: Iterable[Any]) -> list[Any]:
    """Variables in order, each of them once."""
    return list({id(variable): variable for variable in variables}.values())


def carried(model: keras.Layer, kind: type) -> Iterator[tuple[str, Any]]:
    """Paths and instances of `kind` in attributes of layers and their classes, weights included."""
    owners = layer_names(model)
    visited = {*map(id, owners.values()), *(id(vars(owner)) for owner in owners.values())}
    base_attributes = base_layer_attributes()
    for name, owner in owners.items():
        class_attributes = [vars(each) for each in type(owner).__mro__ if is_user_class(each)]
        for attributes in (vars(owner), *class_attributes):
            for attribute, value in list(attributes.items()):
                if attribute not in base_attributes:
                    path = f"{name}.{attribute}".removeprefix(".")
                    yield from iter_nested(
                        path, value, lambda each: isinstance(each, kind), visited
                    )


def layer_names(model: keras.Layer) -> dict[str, keras.Layer]:
    """A model's layers by canonical name; the model itself has the name `""`."""
    _, *inner = keras_private.layers_of(model)
    names = keras_model.canonical_names([_Named(layer) for layer in inner])
    return {"": model, **dict(zip(names, inner, strict=True))}


class _Named:
    """Path of a layer for `canonical_names`; an unbuilt layer's is its name."""

    def __init__(self, layer: keras.Layer) -> None:
        self.path = layer.path or layer.name


@functools.cache
def base_layer_attributes() -> frozenset[str]:
    """Names of the attributes that every Keras layer has."""
    return frozenset(vars(keras.layers.Layer(name="any")))


class CarryScope(keras.StatelessScope):
    """A `StatelessScope` that stops gradients through assignments to carried variables, as outside of one."""

    def __init__(
        self, mapping: Iterable[tuple[Any, Any]], carried: Collection[Any], **options: Any
    ) -> None:
        super().__init__(mapping, **options)
        self._carried = {id(variable) for variable in carried}

    def add_update(self, update: tuple[Any, Any]) -> None:
        variable, value = update
        if id(variable) in self._carried:
            value = keras.ops.stop_gradient(value)
        super().add_update((variable, value))


def carrying(
    compute: Callable[[Any, Any], Any], variables: Collection[Any], carried: Collection[Any]
) -> Callable[[Any, Any], Any]:
    """Wraps a computation so that it assigns variables only at its end, for carried state on torch.

    The backward pass needs the variables' previous values, which Keras would overwrite in place.

    Args:
        compute: Function of inputs and targets that returns loss and predictions.
        variables: All variables that it may assign.
        carried: Variables among them whose previous values gradients may need; these are cloned.
    """
    carried_ids = {id(variable) for variable in carried}

    def computed(inputs: Any, targets: Any) -> Any:
        if keras_private.is_stateless():
            return compute(inputs, targets)
        before = [v.value.clone() if id(v) in carried_ids else v.value for v in variables]
        pairs = zip(variables, before, strict=True)
        with CarryScope([*pairs], carried, collect_losses=True) as scope:
            result = compute(inputs, targets)
        for variable, value in zip(variables, before, strict=True):
            after = scope.get_current_value(variable)
            if after is not value:
                variable.assign(after)
        return result

    return computed
