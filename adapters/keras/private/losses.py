"""Reduction of losses and metrics: denominators, masks, class axes."""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import keras
from keras.src import backend
from keras.src.losses import loss as loss_module

from isotrain.adapters.common.private_api import PrivateApiProbe, require
from isotrain.adapters.keras.private.masks import set_mask
from isotrain.adapters.keras.private.misc import patched_attribute


def local_mean_losses() -> contextlib.AbstractContextManager[None]:
    """Context in which losses are means over their samples, unscaled also under `tf.distribute`."""
    return patched_attribute(loss_module, "scale_loss_for_distribution", lambda value: value)


def _probe_loss_scaling() -> None:
    def doubled(value: Any) -> Any:
        return value * 2

    ones, zeros = keras.ops.ones((2, 1)), keras.ops.zeros((2, 1))
    with patched_attribute(loss_module, "scale_loss_for_distribution", doubled):
        loss = keras.losses.MeanSquaredError()(ones, zeros)
    require(float(loss) == 2.0, "losses are scaled by losses.loss.scale_loss_for_distribution")


@contextlib.contextmanager
def observe_loss_denominators(counted: Callable[[Any | None], None]) -> Iterator[None]:
    """Context in which every reduction of a loss reports its denominator.

    Args:
        counted: Receives a scalar for each reduction: the number of unmasked positions, or the sum of the
            weights with `mean_with_sample_weight`; None where the denominator is the number of values.
    """
    original = loss_module.reduce_weighted_values

    def noted(values: Any, sample_weight: Any, mask: Any, reduction: Any, dtype: Any) -> Any:
        weights = mask
        if reduction == "mean_with_sample_weight":
            weights = loss_module.apply_mask(sample_weight, mask, values.dtype, reduction)
        is_mean = reduction in ("mean", "sum_over_batch_size", "mean_with_sample_weight")
        is_unweighted = weights is None or not is_mean
        counted(None if is_unweighted else keras.ops.sum(keras.ops.cast(weights, values.dtype)))
        return original(values, sample_weight, mask, reduction, dtype)

    with patched_attribute(loss_module, "reduce_weighted_values", noted):
        yield


def weighted_mean(values: Any, weights: Any | None, mask: Any | None) -> Any:
    """Mean over unmasked positions of values times weights, as Keras computes it; a scalar.

    Args:
        values: Losses, one per sample or position, floating-point.
        weights: Sample weights, of a shape that broadcasts to the values'; None: 1.
        mask: Boolean mask, of a shape that broadcasts to the values'; None: no masking.
    """
    return loss_module.reduce_weighted_values(
        values,
        sample_weight=weights,
        mask=mask,
        reduction="sum_over_batch_size",
        dtype=values.dtype,
    )


def _probe_loss_denominators() -> None:
    denominators: list[Any] = []
    plain, masked = keras.ops.ones((2, 1)), keras.ops.ones((2, 1))
    set_mask(masked, keras.ops.convert_to_tensor([True, False]))
    with observe_loss_denominators(denominators.append):
        for predictions in (plain, masked):
            keras.losses.MeanSquaredError()(keras.ops.zeros((2, 1)), predictions)
    is_counted = denominators[0] is None and float(denominators[1]) == 1.0
    require(is_counted, "what counts in a loss with a mask")
    mean = weighted_mean(plain[:, 0], keras.ops.convert_to_tensor([3.0, 1.0]), None)
    require(float(mean) == 2.0, "the mean of weighed values")


def set_probability_loss(loss: Callable[[Any, Any], Any]) -> None:
    """Patches Keras' binary cross-entropy of probabilities; that of logits stays Keras'.

    Args:
        loss: Function of probabilities, away from 0 and 1, and targets of the same shape, that returns the
            loss of each element.
    """
    native = inspect.unwrap(backend.nn.binary_crossentropy)

    @functools.wraps(native)
    def binary_crossentropy(target: Any, output: Any, from_logits: bool = False) -> Any:
        target, output = map(keras.ops.convert_to_tensor, (target, output))
        if from_logits or target.shape != output.shape:
            return native(target, output, from_logits)
        margin = keras.config.epsilon()
        return loss(keras.ops.clip(output, margin, 1.0 - margin), target)

    backend.nn.binary_crossentropy = binary_crossentropy


def _probe_probability_loss() -> None:
    def distance(probabilities: Any, targets: Any) -> Any:
        return keras.ops.abs(probabilities - targets)

    ones, halves = keras.ops.ones((2, 1)), keras.ops.full((2, 1), 0.5)
    previous = backend.nn.binary_crossentropy
    with patched_attribute(backend.nn, "binary_crossentropy", previous):
        set_probability_loss(distance)
        losses = keras.losses.BinaryCrossentropy()(ones, halves)
    require(float(losses) == 0.5, "the loss of probabilities is backend.nn.binary_crossentropy")


def is_built(metric: keras.metrics.Metric) -> bool:
    """Whether a metric has all its variables; some create them on the first update."""
    return bool(getattr(metric, "_built", True))


def _probe_is_built() -> None:
    metric = keras.metrics.R2Score()
    require(not is_built(metric), "R2Score without variables before its first samples")
    metric.update_state(keras.ops.ones((2, 1)), keras.ops.zeros((2, 1)))
    require(is_built(metric), "R2Score with its variables afterwards")


def class_axis(part: keras.losses.Loss | keras.metrics.Metric) -> int:
    """Class axis of a loss's or metric's predictions: its `axis` option, else -1."""
    axis: int = getattr(part, "_fn_kwargs", {}).get("axis", -1)
    return axis


def _probe_class_axis() -> None:
    makers = (
        keras.losses.SparseCategoricalCrossentropy,
        keras.metrics.SparseCategoricalCrossentropy,
    )
    for maker in makers:
        require(class_axis(maker(axis=1)) == 1, f"the axis that {maker.__name__} was given")
        require(class_axis(maker()) == -1, f"the last axis of {maker.__name__}")
    require(class_axis(keras.metrics.SparseCategoricalAccuracy()) == -1, "the last axis else")


PROBES = (
    PrivateApiProbe("losses.loss.scale_loss_for_distribution", _probe_loss_scaling),
    PrivateApiProbe("losses.loss.reduce_weighted_values", _probe_loss_denominators),
    PrivateApiProbe("backend.nn.binary_crossentropy", _probe_probability_loss),
    PrivateApiProbe("Metric._built", _probe_is_built),
    PrivateApiProbe("LossFunctionWrapper._fn_kwargs", _probe_class_axis),
)
