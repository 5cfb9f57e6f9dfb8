"""Weights of a model: trainable ones, others, and those that it updates itself; and traits of its layers."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import keras
import tensorflow as tf

from isotrain.adapters.keras import carried_state as keras_carried_state
from isotrain.adapters.keras import layer_traits as keras_layer_traits
from isotrain.adapters.keras import private as keras_private
from isotrain.adapters.keras import weights as keras_weights
from isotrain.adapters.tensorflow.base import private_api
from isotrain.adapters.tensorflow.trainer.state import canonical_names, native
from isotrain.plugin import LayerTrait, SpecError, TrainingSpec, Trait


def require_precision(model: Any, precision: str) -> None:
    """Refuses mixed precision for a model that would ignore it.

    Raises:
        SpecError: The model is a plain tf.Module.
    """
    if precision in ("bfloat16", "float16") and not isinstance(model, keras.Layer):
        raise SpecError(
            f"precision: a tf.Module computes in the dtypes of its own variables, so that {precision!r}"
            " has no effect on it. Use a Keras model, or float32."
        )


def moving_statistics(model: Any, per_replica: Collection[Any]) -> list[Any]:
    """The weights that forward passes update without training them.

    Args:
        model: The built model.
        per_replica: Weights that each replica keeps for itself, which are left out.
    """
    if isinstance(model, keras.Layer):
        return keras_weights.moving_statistics(model, per_replica)
    left_out = set(map(id, per_replica))
    return [
        variable
        for variable in _module_weights(model)[1]
        if variable.dtype.is_floating and id(variable) not in left_out
    ]


def per_replica_weights(
    trainable: Sequence[Any], others: Sequence[Any], spec: TrainingSpec
) -> dict[str, Any]:
    """The non-trainable weights, any shapes, that the spec lets each replica keep for itself, by name."""
    names = canonical_names([*trainable, *others])
    count = len(trainable)
    by_name = dict(zip(names[count:], others, strict=True))
    return {name: by_name[name] for name in spec.per_replica_names(names[:count], by_name)}


def self_updating(model: Any, others: Sequence[Any]) -> list[Any]:
    """The weights that a model updates itself, or may, also in evaluation mode; seeds among them."""
    return (
        keras_weights.self_updating_weights(model)
        if isinstance(model, keras.Layer)
        else list(others)
    )


def carried_variables(model: Any) -> dict[str, tf.Variable]:
    """Variables, any shape, that a Keras model's layers carry from step to step beside weights, by name."""
    if not isinstance(model, keras.Layer):
        return {}
    carried = {
        name: native(variable)
        for name, variable in keras_carried_state.carried_variables(model).items()
    }
    known_ids = {id(native(each)) for each in (*model.variables, *carried.values())}
    tf_variables = keras_carried_state.carried(model, tf.Variable)
    return carried | {name: each for name, each in tf_variables if id(each) not in known_ids}


def layers_of(model: Any) -> list[Any]:
    """A model and its layers, or the modules in a tf.Module, at any depth."""
    if isinstance(model, keras.Layer):
        return list(keras_private.layers_of(model))
    return [model, *model.submodules]


def weights_of(model: Any, spec: TrainingSpec) -> tuple[list[Any], list[Any]]:
    """A model's trainable weights, and its others, among them those that the spec freezes.

    Raises:
        SpecError: The model is neither a Keras model nor a tf.Module.
    """
    if isinstance(model, keras.Layer):
        return list(model.trainable_variables), list(model.non_trainable_variables)
    if isinstance(model, tf.Module):
        return _freeze(*_module_weights(model), spec)
    raise SpecError(
        f"model: the function returned {type(model).__name__!r}; a tensorflow backend trains a"
        " Keras model, a dict of Keras models, or a tf.Module."
    )


def _module_weights(model: tf.Module) -> tuple[list[Any], list[Any]]:
    trainable = list(model.trainable_variables)
    trainable_ids = {id(variable) for variable in trainable}
    return trainable, [each for each in model.variables if id(each) not in trainable_ids]


def _freeze(
    trainable: list[Any], others: list[Any], spec: TrainingSpec
) -> tuple[list[Any], list[Any]]:
    """Moves the trainable weights that the spec freezes to the others.

    Raises:
        SpecError: The spec freezes untrained weights, which the module may update itself.
    """
    names = canonical_names([*trainable, *others])
    frozen = [spec.is_frozen(name) for name in names]
    untrained = [name for name, is_frozen in zip(names, frozen, strict=True) if is_frozen][
        sum(frozen[: len(trainable)]) :
    ]
    if untrained:
        raise SpecError(
            f"initial_weights.freeze: {', '.join(untrained)}: a tf.Module updates its untrained weights"
            " itself. Leave them out."
        )
    flagged = list(zip(trainable, frozen, strict=False))
    frozen_weights = [weight for weight, is_frozen in flagged if is_frozen]
    trained_weights = [weight for weight, is_frozen in flagged if not is_frozen]
    return trained_weights, [*others, *frozen_weights]


def model_traits(model: Any, precision: str) -> list[LayerTrait]:
    """Lists the traits of a Keras model, or of a tf.Module and the Keras layers inside it.

    Args:
        model: The built model.
        precision: The spec's precision.
    """
    if isinstance(model, keras.Layer):
        return keras_layer_traits.model_traits(model, precision)
    keras_layers = private_api.keras_layers_of(model)
    all_layers = [layer for outer in keras_layers for layer in keras_private.layers_of(outer)]
    traits = keras_layer_traits.layer_traits(dict.fromkeys(all_layers), precision)
    kind = type(model).__name__
    if precision == "float64" and any(_is_narrow(v) for v in model.trainable_variables):
        traits.append(LayerTrait(Trait.LOWER_PRECISION, "model", kind))
    return [*traits, LayerTrait(Trait.HIDDEN, "model", kind)]


def _is_narrow(variable: Any) -> bool:
    dtype = tf.as_dtype(variable.dtype)
    return dtype.is_floating and dtype != tf.float64
