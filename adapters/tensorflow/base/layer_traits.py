"""Traits of the layers of a TensorFlow model that affect whether backends agree."""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf

from isotrain.adapters.keras import layer_traits as keras_layer_traits
from isotrain.adapters.keras import private as keras_private
from isotrain.adapters.tensorflow.base import private_api
from isotrain.plugin import LayerTrait, Trait


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
