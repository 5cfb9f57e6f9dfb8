"""Variables that Keras' layers keep and no list of weights has, such as the states of stateful RNNs.

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
    """The Keras variables in attributes of layers that are none of the model's weights, by canonical name."""
    weights = {id(variable) for variable in model.variables}
    found = [each for _, each in carried(model, keras.Variable) if id(each) not in weights]
    unique = list({id(each): each for each in found}.values())
    return dict(zip(keras_model.canonical_names(unique), unique, strict=True))


def carried(model: keras.Layer, kind: type) -> Iterator[tuple[str, Any]]:
    """What layers and their classes hold of a kind, with a path; a weight may be among it."""
    owners = layer_names(model)
    known = {*map(id, owners.values()), *(id(vars(owner)) for owner in owners.values())}
    usual = base_layer_attributes()
    for name, owner in owners.items():
        of_classes = [vars(each) for each in type(owner).__mro__ if is_user_class(each)]
        for attributes in (vars(owner), *of_classes):
            for attribute, value in list(attributes.items()):
                if attribute not in usual:
                    path = f"{name}.{attribute}".removeprefix(".")
                    yield from iter_nested(path, value, lambda each: isinstance(each, kind), known)


def layer_names(model: keras.Layer) -> dict[str, keras.Layer]:
    """A model's layers by their paths; the model itself has none."""
    _, *inner = keras_private.layers_of(model)
    names = keras_model.canonical_names([_Named(layer) for layer in inner])
    return {"": model, **dict(zip(names, inner, strict=True))}


class _Named:
    """Gives a layer a path also where it is not built."""

    def __init__(self, layer: keras.Layer) -> None:
        self.path = layer.path or layer.name


@functools.cache
def base_layer_attributes() -> frozenset[str]:
    """The attributes that Keras gives every layer."""
    return frozenset(vars(keras.layers.Layer(name="any")))


class CarryScope(keras.StatelessScope):
    """A scope in which no gradient flows through what is assigned to some variables, as outside of one."""

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
    """A computation that sets variables when it is over, so that they may be carried through a step on torch.

    Its backward pass needs what they were, which Keras would have overwritten.

    Args:
        compute: From inputs and targets to loss and predictions.
        variables: All that it may set.
        carried: Those of them whose values gradients may need.
    """
    own = {id(variable) for variable in carried}

    def computed(inputs: Any, targets: Any) -> Any:
        if keras_private.is_stateless():
            return compute(inputs, targets)
        before = [v.value.clone() if id(v) in own else v.value for v in variables]
        pairs = zip(variables, before, strict=True)
        with CarryScope([*pairs], carried, collect_losses=True) as scope:
            found = compute(inputs, targets)
        for variable, value in zip(variables, before, strict=True):
            after = scope.get_current_value(variable)
            if after is not value:
                variable.assign(after)
        return found

    return computed
