"""Losses of portable models, and the denominators of their means where targets weigh differently.

Imported by adapters only after `keras_backend.set_backend`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import keras

from isotrain.adapters.common import callables
from isotrain.adapters.common import spec_components as choices
from isotrain.adapters.common.objective import Objective, ObjectiveResult
from isotrain.adapters.common.outputs import OutputSelector
from isotrain.adapters.keras import builtin_names as keras_names
from isotrain.adapters.keras import private as keras_private
from isotrain.adapters.keras.metrics import (
    Accuracy,
    Loss,
    OutputLossMetric,
    build_losses,
    build_metrics,
    checking_shapes,
    is_keras_builtin,
)
from isotrain.plugin import Component, SpecError, TrainingSpec, WeightedLosses


class LossTerm(NamedTuple):
    """One loss of a slice of the batch.

    Attributes:
        mean: Mean loss of the slice, a scalar.
        denominator: Denominator of the mean, a scalar, such as the number of unmasked positions; None
            where it is the number of samples.
    """

    mean: Any
    denominator: Any | None


LossTerms = Callable[[Any, Any], list[LossTerm]]
"""`terms(targets, predictions)`: one term for each loss of the spec."""


class PerOutputLoss:
    """The loss of one output, before `loss_weights`. Step and metric share one computation per slice.

    Attributes:
        loss: Loss function of targets and predictions.
        accuracy: Accuracy of the predictions that the loss takes, where these may not be whole; else None.
    """

    accuracy: Accuracy | None = None

    def __init__(self, loss: Loss, output: str | None) -> None:
        """Starts with an empty cache.

        Args:
            loss: Loss function of targets and predictions.
            output: Output name; None for the loss of the whole output, which gets no metric.
        """
        self.loss = loss
        self._is_measured = output is not None
        self._latest: tuple[Any, LossTerm] | None = None

    def __call__(self, targets: Any, predictions: Any, weights: Any | None) -> LossTerm:
        """Computes the loss of a slice, and keeps it for `measured`."""
        term = _part(self.loss, targets, predictions, weights)
        if self._is_measured:
            self._latest = predictions, term
        return term

    def measured(self, targets: Any, predictions: Any, weights: Any | None) -> LossTerm:
        """The term kept for these predictions, by identity; computed anew for others."""
        latest, self._latest = self._latest, None
        if latest is not None and latest[0] is predictions:
            return latest[1]
        return _part(self.loss, targets, predictions, weights)


Losses = Mapping[str | None, PerOutputLoss]
"""The losses of a spec, by output name; None is the loss of the whole output."""


def build_output_losses(spec: TrainingSpec, framework: str) -> dict[str | None, PerOutputLoss]:
    """Makes the spec's losses, by output name."""
    return {o: PerOutputLoss(loss, o) for o, loss in build_losses(spec, framework).items()}


def loss_terms(losses: Losses, spec: TrainingSpec, outputs: OutputSelector) -> LossTerms:
    """Makes the function that computes every loss of a slice, one for each output that has a loss.

    Args:
        losses: Losses by output name.
        spec: Training spec, for `loss_weights`.
        outputs: Selects one output's targets, predictions and sample weights.
    """
    factors = spec.loss_weights or {}

    def parts(targets: Any, predictions: Any) -> list[LossTerm]:
        return [
            _times(loss(*outputs.sample(targets, predictions, output)), factors.get(str(output)))
            for output, loss in losses.items()
        ]

    return parts


def objective_terms(objective: Objective, result: ObjectiveResult) -> list[LossTerm]:
    """Terms of what an objective returned; those of named losses are kept as `objective.latest`."""
    terms = [_objective_term(losses) for losses in result.losses.values()]
    if any(term.denominator is not None for term in terms):  # sums of weights are large numbers
        wide = keras.backend.result_type(*(term.mean.dtype for term in terms), "float32")
        terms = [term._replace(mean=keras.ops.cast(term.mean, wide)) for term in terms]
    objective.latest = terms
    return terms


def _objective_term(losses: Any) -> LossTerm:
    if not isinstance(losses, WeightedLosses):
        return LossTerm(mean_over_samples(losses), None)
    values = callables.require_tensor(losses.losses, "the loss or objective")
    values = keras.ops.cast(values, keras.backend.result_type(values.dtype, "float32"))
    weights = keras.ops.cast(losses.weights, values.dtype)
    weights = keras.ops.stop_gradient(keras.ops.broadcast_to(weights, keras.ops.shape(values)))
    denominator = keras.ops.sum(weights)
    divisor = keras.ops.where(denominator > 0, denominator, keras.ops.ones_like(denominator))
    return LossTerm(keras.ops.sum(values * weights) / divisor, denominator)


def _times(part: LossTerm, factor: float | None) -> LossTerm:
    return part if factor is None else part._replace(mean=part.mean * factor)


def build_metrics_and_losses(
    spec: TrainingSpec, framework: str, losses: Losses
) -> tuple[list[keras.metrics.Metric], list[Component]]:
    """Makes new metrics: the spec's, and one for the loss of each named output.

    Args:
        spec: Training spec, for the metrics.
        framework: Framework whose functions are used, where the spec has one per framework.
        losses: Losses by output name: those that the steps compute, or equal ones.

    Returns:
        The metrics, and the spec entry of each.
    """
    output_losses = {output: loss for output, loss in losses.items() if output is not None}
    loss_metrics = [OutputLossMetric(loss.measured) for loss in output_losses.values()]
    components = [*spec.metrics, *(Component("loss", output=output) for output in output_losses)]
    measured = build_metrics(spec, framework)
    if accuracy := next((each.accuracy for each in losses.values()), None):
        measured = [
            keras.metrics.MeanMetricWrapper(accuracy, name=component.name)
            if component.name in keras_names.ACCURACIES and not component.options
            else metric
            for metric, component in zip(measured, spec.metrics, strict=True)
        ]
    metrics = [*measured, *loss_metrics]
    shown = [component.shown(m.name) for m, component in zip(metrics, components, strict=True)]
    choices.require_unique_names(shown)
    return metrics, components


def _part(loss: Loss, targets: Any, predictions: Any, weights: Any | None) -> LossTerm:
    denominators: list[Any | None] = []
    mask = keras_private.mask_of(predictions)
    if weights is not None:
        weights = keras.ops.copy(weights)  # Keras multiplies masks into them, on torch in place
    with keras_private.observe_loss_denominators(denominators.append):
        if isinstance(loss, keras.losses.Loss):
            call = checking_shapes("loss", loss) if is_keras_builtin(loss) else loss
            values = call(targets, predictions, weights)
        elif weights is None and mask is None:
            values = loss(targets, predictions)
        else:
            values = _reduced(loss(targets, predictions), weights, mask)
    denominator = denominators[0] if len(denominators) == 1 else None
    return LossTerm(mean_over_samples(values), denominator)


def _reduced(values: Any, weights: Any | None, mask: Any | None) -> Any:
    """Weighted, masked mean of a custom loss function's values, as Keras computes it; else the values.

    Args:
        values: Result of the function: one value per sample or position, or a scalar mean.
        weights: Sample weights, shape `[samples]` or one that broadcasts to the values' shape.
        mask: Mask of the predictions, boolean, one value per sample or position.

    Raises:
        SpecError: The function returned a scalar mean, and samples have weights.
    """
    callables.require_tensor(values, "the loss")
    rank = len(values.shape)
    if weights is not None and not rank:
        raise SpecError(
            "loss: samples have weights, and it returned their mean; expected one value per sample."
        )
    if mask is not None and len(mask.shape) > rank:
        mask = None  # the function has reduced the masked axis itself
    if weights is None and mask is None:
        return values
    return keras_private.weighted_mean(values, weights, mask)


def mean_over_samples(loss: Any) -> Any:
    """Mean of a loss function's result, a scalar; the result may be a scalar or a tensor of any shape.

    Raises:
        SpecError: The function did not return a tensor.
    """
    callables.require_tensor(loss, "the loss or objective")
    return loss if len(loss.shape) == 0 else keras.ops.mean(loss)


def sum_of_means(parts: Sequence[LossTerm], added: Callable[[Any], Any]) -> Any:
    """Sum of the means, a scalar: the loss of a slice as if it were the global batch.

    Args:
        parts: Loss terms of the slice.
        added: Adds the losses of the model's own layers.
    """
    total = parts[0].mean
    for part in parts[1:]:
        total = total + part.mean
    return added(total)


def means_and_denominators(parts: Sequence[LossTerm], added: Callable[[Any], Any]) -> Any:
    """The loss of a slice, with the denominators needed for the mean over the global batch.

    Args:
        parts: Loss terms of the slice.
        added: Adds the losses of the model's own layers.

    Returns:
        The mean loss, a scalar, if no term has a denominator. Else a tensor of shape `[2, 1 + losses]`.
        Row 0: the sum of the means over samples, then the mean of each term that has a denominator (0 for
        the other terms). Row 1: 0, then the denominators (0 for the other terms).
    """
    sample_means = [part for part in parts if part.denominator is None]
    if len(sample_means) == len(parts):
        return sum_of_means(parts, added)
    zero = keras.ops.zeros_like(parts[0].mean)
    means = [zero if part.denominator is None else part.mean for part in parts]
    counts = [zero if part.denominator is None else part.denominator for part in parts]
    first = sum_of_means(sample_means, added) if sample_means else added(zero)
    return keras.ops.stack([keras.ops.stack([first, *means]), keras.ops.stack([zero, *counts])])
