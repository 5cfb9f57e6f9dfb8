"""What the layers of a TensorFlow model do that bears on whether runs agree."""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf

from isotrain.adapters.keras import layer_traits as keras_layer_traits
from isotrain.adapters.keras import private as keras_private
from isotrain.adapters.tensorflow.base import private_api
from isotrain.plugin import LayerTrait, Trait


def model_traits(model: Any, precision: str) -> list[LayerTrait]:
    """Lists the traits of a Keras model, or of a tf.Module and the Keras layers that it holds.

    Args:
        model: The built model.
        precision: The spec's.
    """
    if isinstance(model, keras.Layer):
        return keras_layer_traits.model_traits(model, precision)
    held = private_api.keras_layers_of(model)
    inner = [layer for outer in held for layer in keras_private.layers_of(outer)]
    found = keras_layer_traits.layer_traits(dict.fromkeys(inner), precision)
    kind = type(model).__name__
    if precision == "float64" and any(_is_narrow(v) for v in model.trainable_variables):
        found.append(LayerTrait(Trait.LOWER_PRECISION, "model", kind))
    return [*found, LayerTrait(Trait.HIDDEN, "model", kind)]


def _is_narrow(variable: Any) -> bool:
    kind = tf.as_dtype(variable.dtype)
    return kind.is_floating and kind != tf.float64
