"""Shapes and dtypes in which losses and metrics of native models compare targets and predictions."""

from __future__ import annotations

from torch import Tensor

from isotrain.plugin import SpecError


def same_rank(targets: Tensor, predictions: Tensor) -> tuple[Tensor, Tensor]:
    """Adds or removes a last axis of length 1 that only one of two tensors (any shape) has, as Keras does."""
    more = predictions.dim() - targets.dim()
    if more == 1 and predictions.shape[-1] == 1:
        if targets.dim() == 1:
            return targets.unsqueeze(-1), predictions
        return targets, predictions.squeeze(-1)
    if more == -1 and targets.shape[-1] == 1:
        if predictions.dim() == 1:
            return targets, predictions.unsqueeze(-1)
        return targets.squeeze(-1), predictions
    return targets, predictions


def same_shape_and_dtype(targets: Tensor, predictions: Tensor) -> tuple[Tensor, Tensor]:
    """Targets and predictions (any shape) as from `same_shape`, the targets in the predictions' dtype."""
    targets, predictions = same_shape(targets, predictions)
    return targets.to(predictions.dtype), predictions


def same_shape(targets: Tensor, predictions: Tensor) -> tuple[Tensor, Tensor]:
    """Targets and predictions (any shape) with equal shapes, after `same_rank`.

    Raises:
        SpecError: The shapes differ, even if they could be broadcast.
    """
    if targets.dim() != predictions.dim():
        targets, predictions = same_rank(targets, predictions)
    if targets.shape != predictions.shape:
        raise SpecError(
            f"loss or metric: the targets have shape {list(targets.shape)} and the predictions"
            f" {list(predictions.shape)}; this one compares elements, and needs equal shapes. Change the"
            " shape in the data or at the end of the model."
        )
    return targets, predictions


def broadcast_weights(weights: Tensor, values: Tensor) -> Tensor:
    """Sample weights with trailing axes of length 1, so that they broadcast over the values; in their dtype.

    Args:
        weights: Sample weights; their shape is that of the values, or its first axes.
        values: Loss values, shape `[samples, ...]`.

    Raises:
        SpecError: The shapes do not fit.
    """
    if weights.dim() > values.dim() and weights.shape[-1] == 1:
        weights = weights.squeeze(-1)
    if weights.shape != values.shape[: weights.dim()]:
        raise SpecError(
            f"data: sample weights of shape {list(weights.shape)} do not fit loss values of shape"
            f" {list(values.shape)}: expected that shape, or its first axes."
        )
    axes = (1,) * (values.dim() - weights.dim())
    return weights.reshape(*weights.shape, *axes).to(values.dtype)


def classes_and_scores(
    targets: Tensor, predictions: Tensor, axis: int = -1
) -> tuple[Tensor, Tensor]:
    """Targets as int64 `[samples, ...]`; predictions as `[samples, classes, ...]`, torch's layout."""
    if targets.dim() == predictions.dim() and targets.shape[axis] == 1:
        targets = targets.squeeze(axis)
    has_axis = axis % predictions.dim() == 1
    scores = predictions if has_axis else predictions.movedim(axis, 1)
    return targets.long(), scores
