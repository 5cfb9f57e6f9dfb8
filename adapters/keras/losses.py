"""The loss of a portable model, and by what its mean counts where targets do not count alike.

Imported by adapters only after `keras_backend.set_backend`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import keras

from isotrain.adapters.common import callables
from isotrain.adapters.common import resolve as choices
from isotrain.adapters.common.outputs import OutputSelector
from isotrain.adapters.keras import private as keras_private
from isotrain.adapters.keras.metrics import (
    Loss,
    OutputLossMetric,
    build_losses,
    build_metrics,
    checking_shapes,
    is_keras_builtin,
)
from isotrain.plugin import Component, SpecError, TrainingSpec


class LossTerm(NamedTuple):
    """One loss of a slice.

    Attributes:
        mean: Over what counts in the slice.
        loss_denominators: How much that is: places that no mask hides, for one; None where it is all samples.
    """

    mean: Any
    loss_denominators: Any | None


LossTerms = Callable[[Any, Any], list[LossTerm]]
"""`parts(targets, predictions)`: every loss of the spec."""


class PerOutputLoss:
    """The loss of one output, before `loss_weights` multiplies it; that of a slice is computed once.

    Attributes:
        loss: Of targets and predictions.
    """

    def __init__(self, loss: Loss, output: str | None) -> None:
        """Remembers no slice yet.

        Args:
            loss: Of targets and predictions.
            output: Its name; None for what the model gives, whose loss is not measured.
        """
        self.loss = loss
        self._is_measured = output is not None
        self._latest: tuple[Any, LossTerm] | None = None

    def __call__(self, targets: Any, predictions: Any, weights: Any | None) -> LossTerm:
        """Computes it, and remembers it until it is measured."""
        part = _part(self.loss, targets, predictions, weights)
        if self._is_measured:
            self._latest = predictions, part
        return part

    def measured(self, targets: Any, predictions: Any, weights: Any | None) -> LossTerm:
        """The same of the slice that was computed last, if these are its predictions; else anew."""
        latest, self._latest = self._latest, None
        if latest is not None and latest[0] is predictions:
            return latest[1]
        return _part(self.loss, targets, predictions, weights)


Losses = Mapping[str | None, PerOutputLoss]
"""The losses of a spec, by output."""


def build_output_losses(spec: TrainingSpec, framework: str) -> dict[str | None, PerOutputLoss]:
    """Makes the spec's losses by output."""
    return {o: PerOutputLoss(loss, o) for o, loss in build_losses(spec, framework).items()}


def loss_terms(losses: Losses, spec: TrainingSpec, outputs: OutputSelector) -> LossTerms:
    """Makes the function that gives every loss of a slice, one for each output where there are several.

    Args:
        losses: By output.
        spec: Gives their weights.
        outputs: Of the model.
    """
    factors = spec.loss_weights or {}

    def parts(targets: Any, predictions: Any) -> list[LossTerm]:
        return [
            _times(loss(*outputs.sample(targets, predictions, output)), factors.get(str(output)))
            for output, loss in losses.items()
        ]

    return parts


def _times(part: LossTerm, factor: float | None) -> LossTerm:
    return part if factor is None else part._replace(mean=part.mean * factor)


def build_metrics_and_losses(
    spec: TrainingSpec, framework: str, losses: Losses
) -> tuple[list[keras.metrics.Metric], list[Component]]:
    """Makes the spec's metrics anew, and the loss of each output where it gives several.

    Args:
        spec: Gives them.
        framework: Whose entry of the spec is taken.
        losses: By output: those that the steps compute, or others like them.

    Returns:
        The metrics, and what the spec says of each.
    """
    several = {output: loss for output, loss in losses.items() if output is not None}
    own = [OutputLossMetric(loss.measured) for loss in several.values()]
    chosen = [*spec.metrics, *(Component("loss", output=output) for output in several)]
    metrics = [*build_metrics(spec, framework), *own]
    shown = [given.shown(m.name) for m, given in zip(metrics, chosen, strict=True)]
    choices.require_unique_names(shown)
    return metrics, chosen


def _part(loss: Loss, targets: Any, predictions: Any, weights: Any | None) -> LossTerm:
    counts: list[Any | None] = []
    mask = keras_private.mask_of(predictions)
    if weights is not None:
        weights = keras.ops.copy(weights)  # Keras multiplies masks into them, on torch in place
    with keras_private.observe_loss_denominators(counts.append):
        if isinstance(loss, keras.losses.Loss):
            call = checking_shapes("loss", loss) if is_keras_builtin(loss) else loss
            given = call(targets, predictions, weights)
        elif weights is None and mask is None:
            given = loss(targets, predictions)
        else:
            given = _reduced(loss(targets, predictions), weights, mask)
    return LossTerm(mean_over_samples(given), counts[0] if len(counts) == 1 else None)


def _reduced(values: Any, weights: Any | None, mask: Any | None) -> Any:
    """What a person's function gave for each sample or place, weighed and masked as Keras does.

    Raises:
        SpecError: It gave a mean, and samples have weights.
    """
    callables.require_tensor(values, "the loss")
    rank = len(values.shape)
    if weights is not None and not rank:
        raise SpecError(
            "loss: samples have weights, and it returned their mean; expected one value per sample."
        )
    if mask is not None and len(mask.shape) > rank:
        mask = None  # the function has taken the mean over the places itself
    if weights is None and mask is None:
        return values
    return keras_private.weighted_mean(values, weights, mask)


def mean_over_samples(loss: Any) -> Any:
    """Reduces what a loss callable gave to the mean over its samples.

    Raises:
        SpecError: It gave no tensor.
    """
    callables.require_tensor(loss, "the loss or objective")
    return loss if len(loss.shape) == 0 else keras.ops.mean(loss)


def sum_of_means(parts: Sequence[LossTerm], added: Callable[[Any], Any]) -> Any:
    """The sum of the means: the loss of a slice as if it were a whole global batch.

    Args:
        parts: Of the slice.
        added: Adds the losses of the model's own layers.
    """
    total = parts[0].mean
    for part in parts[1:]:
        total = total + part.mean
    return added(total)


def means_and_denominators(parts: Sequence[LossTerm], added: Callable[[Any], Any]) -> Any:
    """The loss of a slice with what is needed to get that of the whole global batch.

    Args:
        parts: Of the slice.
        added: Adds the losses of the model's own layers.

    Returns:
        A scalar, the mean over the samples, where all count alike. Else of shape `[2, 1 + losses]`: first the
        sum of the means over the samples, beside it the mean of each loss that counts by something else
        (0 for others); in the second row what these count by (0 for others).
    """
    alike = [part for part in parts if part.loss_denominators is None]
    if len(alike) == len(parts):
        return sum_of_means(parts, added)
    zero = keras.ops.zeros_like(parts[0].mean)
    means = [zero if part.loss_denominators is None else part.mean for part in parts]
    counts = [zero if part.loss_denominators is None else part.loss_denominators for part in parts]
    first = sum_of_means(alike, added) if alike else added(zero)
    return keras.ops.stack([keras.ops.stack([first, *means]), keras.ops.stack([zero, *counts])])
