"""Loss of a TensorFlow replica, computed while a `tf.function` is traced."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from isotrain.adapters.common.model_call import model_call
from isotrain.adapters.common.objective import Objective
from isotrain.adapters.common.outputs import OutputSelector
from isotrain.adapters.keras import losses as keras_losses
from isotrain.adapters.keras import model as keras_model
from isotrain.adapters.keras.model import LossComputer
from isotrain.plugin import TrainingSpec


def loss_computer(
    spec: TrainingSpec, model: Any, training: bool, objective: Objective | None
) -> LossComputer:
    """Builds the function from (inputs, targets) to loss and predictions; see `means_and_denominators`."""
    if isinstance(model, keras.Layer):
        return keras_model.loss_computer(
            spec, model, "tensorflow", training, with_denominators=True, objective=objective
        )
    if objective is not None:

        def compute_objective(inputs: Any, targets: Any) -> tuple[Any, Any]:
            result = objective.result(objective(model, inputs, targets, training))
            terms = keras_losses.objective_terms(objective, result)
            return keras_losses.means_and_denominators(terms, tf.identity), result.predictions

        return LossComputer(compute_objective, [objective.function], {})
    losses = keras_losses.build_output_losses(spec, "tensorflow")
    terms = keras_losses.loss_terms(losses, spec, OutputSelector())
    call = forward(spec, model, training)

    def compute(inputs: Any, targets: Any) -> tuple[Any, Any]:
        predictions = call(inputs)
        return keras_losses.means_and_denominators(
            terms(targets, predictions), tf.identity
        ), predictions

    return LossComputer(compute, [each.loss for each in losses.values()], losses)


def forward(spec: TrainingSpec, model: Any, training: bool) -> Callable[[Any], Any]:
    """The model's call, as the spec says, with `training` bound if the model's signature takes it."""
    make = keras_model.keras_call if isinstance(model, keras.Layer) else model_call
    call = make(spec, "tensorflow", model)
    return functools.partial(call, training=training) if accepts_training(model) else call


def accepts_training(module: Any) -> bool:
    """Whether a model or module takes the argument `training`."""
    is_layer = isinstance(module, keras.Layer)
    return is_layer or "training" in inspect.signature(module.__call__).parameters


def evaluated_rows(loss: tf.Tensor, count: tf.Tensor, width: int) -> tf.Tensor:
    """Addends of a micro-batch to the sums of an evaluation: losses, and their denominators.

    Args:
        loss: Loss of the micro-batch: a scalar, or means and denominators, shape `[2, 1 + losses]`.
        count: Number of samples, a float64 scalar; 0 for a placeholder.
        width: 1 + the largest number of losses with denominators.

    Returns:
        Float64, shape `[2, width]`.
    """
    loss64 = tf.cast(loss, tf.float64)
    if not loss.shape.rank:
        column = tf.stack([tf.math.multiply_no_nan(loss64, count), count])[:, tf.newaxis]
        return tf.pad(column, [[0, 0], [0, width - 1]])
    loss_denominators = loss64[1, 1:] * tf.cast(count > 0, tf.float64)
    denominators = tf.concat([count[tf.newaxis], loss_denominators], 0)
    rows = tf.stack([tf.math.multiply_no_nan(loss64[0], denominators), denominators])
    return tf.pad(rows, [[0, 0], [0, width - rows.shape[1]]])
