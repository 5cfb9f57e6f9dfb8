"""The loss of a portable model, and by what its mean counts where targets do not count alike.

Imported by adapters only after `keras_backend.claim`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import keras

from isotrain.adapters import called, keras_private
from isotrain.adapters.keras_parts import Loss, build_loss
from isotrain.plugin import TrainingSpec


class Part(NamedTuple):
    """One loss of a slice.

    Attributes:
        mean: Over what counts in the slice.
        counted: How much that is: places that no mask hides, for one; None where it is all samples.
    """

    mean: Any
    counted: Any | None


Parts = Callable[[Any, Any], list[Part]]
"""`parts(targets, predictions)`: every loss of the spec."""


def build_parts(spec: TrainingSpec, framework: str) -> Parts:
    """Makes the spec's losses."""
    loss = build_loss(spec, framework)
    return lambda targets, predictions: [_part(loss, targets, predictions)]


def _part(loss: Loss, targets: Any, predictions: Any) -> Part:
    counts: list[Any | None] = []
    with keras_private.counting_losses(counts.append):
        mean = mean_over_samples(loss(targets, predictions))
    return Part(mean, counts[0] if len(counts) == 1 else None)


def mean_over_samples(loss: Any) -> Any:
    """Reduces what a loss callable gave to the mean over its samples.

    Raises:
        SpecError: It gave no tensor.
    """
    called.require_tensor(loss, "the loss or objective")
    return loss if len(loss.shape) == 0 else keras.ops.mean(loss)


def summed(parts: Sequence[Part], added: Callable[[Any], Any]) -> Any:
    """The sum of the means: the loss of a slice as if it were a whole global batch.

    Args:
        parts: Of the slice.
        added: Adds the losses of the model's own layers.
    """
    total = parts[0].mean
    for part in parts[1:]:
        total = total + part.mean
    return added(total)


def in_rows(parts: Sequence[Part], added: Callable[[Any], Any]) -> Any:
    """The loss of a slice with what is needed to get that of the whole global batch.

    Args:
        parts: Of the slice.
        added: Adds the losses of the model's own layers.

    Returns:
        A scalar, the mean over the samples, where all count alike. Else of shape `[2, 1 + losses]`: first the
        sum of the means over the samples, beside it the mean of each loss that counts by something else
        (0 for others); in the second row what these count by (0 for others).
    """
    alike = [part for part in parts if part.counted is None]
    if len(alike) == len(parts):
        return summed(parts, added)
    zero = keras.ops.zeros_like(parts[0].mean)
    means = [zero if part.counted is None else part.mean for part in parts]
    counts = [zero if part.counted is None else part.counted for part in parts]
    first = summed(alike, added) if alike else added(zero)
    return keras.ops.stack([keras.ops.stack([first, *means]), keras.ops.stack([zero, *counts])])
