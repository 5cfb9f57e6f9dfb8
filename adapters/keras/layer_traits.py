"""Traits of Keras layers that affect whether runs are reproducible and equal to each other.

Imported by adapters only after `keras_backend.set_backend`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import keras

from isotrain.adapters.keras import private as keras_private
from isotrain.adapters.keras.batch_norm import is_local
from isotrain.plugin import LayerTrait, Trait

_RATES = ("rate", "dropout", "recurrent_dropout", "stddev")
_WIDE = "float64"
_FOR_FIT = ("train_step", "test_step", "compute_loss", "compute_metrics")


def model_traits(model: keras.Layer, precision: str) -> list[LayerTrait]:
    """Lists the traits of a Keras model and of its layers.

    Args:
        model: Built model.
        precision: The spec's `precision`.
    """
    kind = type(model).__name__
    custom_training = [
        LayerTrait(Trait.CUSTOM_TRAINING, name, kind) for name in _own_training(model)
    ]
    return layer_traits(keras_private.layers_of(model), precision) + custom_training


def _own_training(model: keras.Layer) -> Iterator[str]:
    """Names of the model's overrides for Keras' `fit`, and `compile(...)` if it was compiled."""
    if not isinstance(model, keras.Model):
        return
    for name in _FOR_FIT:
        if getattr(type(model), name) is not getattr(keras.Model, name):
            yield name
    if model.compiled:
        yield "compile(...)"


def layer_traits(layers: Iterable[keras.Layer], precision: str) -> list[LayerTrait]:
    """Lists the traits of each layer, without those of its inner layers.

    Args:
        layers: All layers, inner ones included.
        precision: The spec's `precision`.
    """
    return [
        LayerTrait(trait, layer.path or layer.name, type(layer).__name__)
        for layer in layers
        for trait in _of_layer(layer, precision)
    ]


def _of_layer(layer: keras.Layer, precision: str) -> Iterator[Trait]:
    is_normalizing = isinstance(layer, keras.layers.BatchNormalization) and layer.trainable
    if is_normalizing and is_local(layer):
        yield Trait.GLOBAL_STATISTICS if layer.synchronized else Trait.LOCAL_STATISTICS
    if keras_private.draws_random_numbers(layer) and not _never_draws(layer):
        yield Trait.RANDOM
    if precision == _WIDE and layer.weights and _computes_narrowly(layer):
        yield Trait.LOWER_PRECISION


def _never_draws(layer: keras.Layer) -> bool:
    """Whether all of a layer's dropout and noise rates are 0: some have a generator all the same."""
    rates = [getattr(layer, name, None) for name in _RATES]
    numbers = [rate for rate in rates if isinstance(rate, int | float)]
    return bool(numbers) and not any(numbers)


def _computes_narrowly(layer: keras.Layer) -> bool:
    dtype: Any = layer.compute_dtype
    return keras.backend.is_float_dtype(dtype) and dtype != _WIDE
