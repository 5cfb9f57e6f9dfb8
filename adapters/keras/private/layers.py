"""Contents of layers: inner layers, weights, losses, hooks."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from typing import Any

import keras
import numpy as np

from isotrain.adapters.common.private_api import PrivateApiProbe, require
from isotrain.adapters.keras.private.misc import patched_attribute


def layers_of(layer: keras.Layer) -> list[keras.Layer]:
    """A layer and all layers inside it, at any depth."""
    return [layer, *layer._flatten_layers(include_self=False)]


def _finds_inner_layers() -> None:
    inner = keras.layers.Dense(1)
    outer = keras.Sequential([keras.Sequential([inner])])
    layers = layers_of(outer)
    require(layers[0] is outer and any(each is inner for each in layers), "layers at any depth")


def sublayers_of(layer: keras.Layer) -> list[keras.Layer]:
    """The direct sublayers of a layer."""
    return list(layer._flatten_layers(include_self=False, recursive=False))


def _finds_parts() -> None:
    dense, inner = keras.layers.Dense(1), keras.Sequential(name="inner")
    inner.add(dense)
    inner.build((None, 2))
    sublayers = sublayers_of(keras.Sequential([inner]))
    require(
        [each for each in sublayers if each is not inner] == [], "no more than the layers inside"
    )
    require(any(each is dense for each in sublayers_of(inner)), "a layer in a Sequential")


def draws_random_numbers(layer: keras.Layer) -> bool:
    """Whether a layer has a seed generator itself; those of inner layers do not count."""
    return bool(layer._seed_generators)


def _knows_who_draws() -> None:
    require(draws_random_numbers(keras.layers.Dropout(0.5)), "a generator in Dropout")
    require(not draws_random_numbers(keras.layers.Dense(1)), "no generator in Dense")


def weights_updated_by(layer: keras.Layer) -> list[Any]:
    """The weights that a layer updates in its call, such as moving statistics, frozen or not."""
    return list(layer._non_trainable_variables)


def _knows_who_moves() -> None:
    layer = keras.layers.BatchNormalization()
    layer.build((None, 2))
    layer.trainable = False
    updated = {id(variable) for variable in weights_updated_by(layer)}
    require(
        updated == {id(layer.moving_mean), id(layer.moving_variance)},
        "the moving mean and variance",
    )


def add_losses(layers: Iterable[keras.Layer]) -> bool:
    """Whether any layer added a loss (`add_loss`, activity regularizer) in its last call."""
    return any(layer._losses or layer._loss_ids for layer in layers)


def _notices_added_losses() -> None:
    layer = keras.layers.ActivityRegularization(l2=1.0)
    require(not add_losses([layer]), "no loss before the call")
    layer(keras.ops.ones((1, 2)))
    require(add_losses([layer]), "a loss after the call")


def forget_losses(layers: Iterable[keras.Layer], losses: Iterable[Any]) -> None:
    """Removes losses added within a `StatelessScope` from the layers that added them."""
    added = set(map(id, losses))
    for layer in layers:
        layer._loss_ids -= added


def _forgets_losses() -> None:
    layer, first = keras.layers.ActivityRegularization(l2=1.0), keras.ops.ones((1, 2))
    with keras.StatelessScope(collect_losses=True) as scope:
        layer.call(first)
        layer.add_loss(keras.ops.sum(first))
        require(len(layer.losses) == 1, "a loss that a layer has added")
        forget_losses([layer], scope.losses)
        require(not layer.losses, "none once it is disowned")


def intercept_assignments(
    note: Callable[[Any, Any], None],
) -> contextlib.AbstractContextManager[None]:
    """Context in which assignments call `note(variable, value)` and leave the variable unchanged."""
    return patched_attribute(keras.Variable, "assign", note)


def _notes_assignments() -> None:
    layer, seen = keras.layers.BatchNormalization(), []
    layer.build((None, 2))
    before = keras.ops.convert_to_numpy(layer.gamma)
    with intercept_assignments(lambda variable, value: seen.append(id(variable))):
        layer.load_own_variables({str(index): np.full(2, 7.0) for index in range(4)})
    require(seen == [id(v) for v in layer.variables], "each variable of a layer is assigned to")
    require(bool((keras.ops.convert_to_numpy(layer.gamma) == before).all()), "and none is changed")


def hooks_of(layers: Iterable[keras.Layer]) -> list[Any]:
    """The dicts of torch hooks that layers have, filled or empty; an empty list on other frameworks."""
    names = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    return [vars(layer)[name] for layer in layers for name in names if name in vars(layer)]


def _knows_hooks() -> None:
    if keras.backend.backend() != "torch":
        return
    layer = keras.layers.Dense(1)
    hooks = hooks_of([layer])
    require(not any(hooks), "no hooks on a new layer")
    layer.register_forward_hook(lambda *given: None)
    require(any(hooks), "a hook in the layer's table")


def register_weights(layers: Iterable[keras.Layer]) -> None:
    """Registers layers' present weights as torch parameters; Keras registers only those made in `build`."""
    for layer in layers:
        weights = {id(variable.value) for variable in layer.variables}
        if hasattr(layer, "_torch_params") and weights != set(map(id, layer.parameters())):
            layer._track_variables()


def _registers_weights() -> None:
    if keras.backend.backend() != "torch":
        return
    layer = keras.layers.Dense(2)
    model = keras.Sequential([keras.Input((2,)), layer])
    layer.enable_lora(1)
    register_weights(layers_of(model))
    registered = {id(parameter) for parameter in model.parameters()}
    require(
        registered == {id(v.value) for v in model.variables},
        "the weights of a layer, and no others",
    )


PROBES = (
    PrivateApiProbe("Layer._flatten_layers", _finds_inner_layers),
    PrivateApiProbe("Layer._flatten_layers, not recursive", _finds_parts),
    PrivateApiProbe("Layer._seed_generators", _knows_who_draws),
    PrivateApiProbe("Layer._non_trainable_variables", _knows_who_moves),
    PrivateApiProbe("Layer._losses and Layer._loss_ids", _notices_added_losses),
    PrivateApiProbe("Layer._loss_ids by identity", _forgets_losses),
    PrivateApiProbe("Layer.load_own_variables by Variable.assign", _notes_assignments),
    PrivateApiProbe("Layer._forward_hooks", _knows_hooks),
    PrivateApiProbe("TorchLayer._track_variables", _registers_weights),
)
