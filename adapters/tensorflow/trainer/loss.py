"""The loss of a TensorFlow replica, while a `tf.function` is traced."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from isotrain.adapters.common.outputs import OutputSelector, objective_batch
from isotrain.adapters.keras import losses as keras_losses
from isotrain.adapters.keras import model as keras_model
from isotrain.adapters.keras.model import LossComputer
from isotrain.plugin import TrainingSpec


def loss_computer(spec: TrainingSpec, model: Any, training: bool) -> LossComputer:
    """Makes the function from (inputs, targets) to loss and predictions; see `means_and_denominators`."""
    if isinstance(model, keras.Layer):
        return keras_model.loss_computer(
            spec, model, "tensorflow", training, with_denominators=True
        )
    if spec.objective is not None:
        objective = keras_model.resolve_for_framework(spec.objective, "tensorflow", "objective")

        def compute_objective(inputs: Any, targets: Any) -> tuple[Any, Any]:
            given = objective(model, objective_batch(inputs, targets))
            losses, predictions = given if isinstance(given, tuple) else (given, None)
            return keras_model.mean_over_samples(losses), predictions

        return LossComputer(compute_objective, [objective], {})
    losses = keras_losses.build_output_losses(spec, "tensorflow")
    parts = keras_losses.loss_terms(losses, spec, OutputSelector())
    called = forward(model, training)

    def compute(inputs: Any, targets: Any) -> tuple[Any, Any]:
        predictions = called(inputs)
        return keras_losses.means_and_denominators(
            parts(targets, predictions), tf.identity
        ), predictions

    return LossComputer(compute, [each.loss for each in losses.values()], losses)


def forward(model: Any, training: bool) -> Callable[[Any], Any]:
    """The call of a model, which is told whether it is training if it wants to know."""
    return functools.partial(model, training=training) if accepts_training(model) else model


def accepts_training(module: Any) -> bool:
    """Whether something that is called, a model or a module, wants to know whether it is training."""
    is_layer = isinstance(module, keras.Layer)
    return is_layer or "training" in inspect.signature(module.__call__).parameters


def evaluated_rows(loss: tf.Tensor, count: tf.Tensor, width: int) -> tf.Tensor:
    """What a slice adds to the sums of an evaluation: of the losses, and of what these count by.

    Args:
        loss: Of the slice, in rows or as a scalar.
        count: Its samples, 0 for a placeholder.
        width: 1 + the number of losses.
    """
    wide = tf.cast(loss, tf.float64)
    if not loss.shape.rank:
        column = tf.stack([tf.math.multiply_no_nan(wide, count), count])[:, tf.newaxis]
        return tf.pad(column, [[0, 0], [0, width - 1]])
    counted = wide[1, 1:] * tf.cast(count > 0, tf.float64)
    counts = tf.concat([count[tf.newaxis], counted], 0)
    return tf.stack([tf.math.multiply_no_nan(wide[0], counts), counts])
