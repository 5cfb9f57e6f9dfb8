"""The named losses in torch's own functions, for native models: the same values as Keras' of that name.

Each function here gives one value per sample, or per place of a sample, from targets and predictions of the
same number of axes; classes need no axis for their scores.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from isotrain.plugin import SpecError

EPSILON = 1e-7
"""What Keras keeps logarithms and quotients away from 0 by."""


class Masked(NamedTuple):
    """Values of which some do not count.

    Attributes:
        values: Per sample or place.
        mask: Of the same shape: true for those that count.
    """

    values: Tensor
    mask: Tensor


def same_rank(targets: Tensor, predictions: Tensor) -> tuple[Tensor, Tensor]:
    """As Keras: a last axis of length 1 that only one of them has is given to the other, or taken away."""
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
    """As `same_shape`, and both with the predictions' type."""
    targets, predictions = same_shape(targets, predictions)
    return targets.to(predictions.dtype), predictions


def same_shape(targets: Tensor, predictions: Tensor) -> tuple[Tensor, Tensor]:
    """Both with the same shape.

    Raises:
        SpecError: They would only agree by broadcasting, or not at all.
    """
    if targets.dim() != predictions.dim():
        targets, predictions = same_rank(targets, predictions)
    if targets.shape != predictions.shape:
        raise SpecError(
            f"loss or metric: the targets have shape {list(targets.shape)} and the predictions"
            f" {list(predictions.shape)}; this one compares them one by one and needs one shape of both."
            " Change it in the data or at the end of the model."
        )
    return targets, predictions


def broadcast_weights(weights: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Sample weights with as many axes as the values that they are multiplied with.

    Raises:
        SpecError: They would only agree by broadcasting, or not at all.
    """
    if weights.dim() > values.dim() and weights.shape[-1] == 1:
        weights = weights.squeeze(-1)
    if weights.shape != values.shape[: weights.dim()]:
        raise SpecError(
            f"data: sample weights of shape {list(weights.shape)} do not fit the loss, which has a value for"
            f" each of {list(values.shape)}: expected that shape, or its first axes."
        )
    axes = (1,) * (values.dim() - weights.dim())
    return weights.reshape(*weights.shape, *axes).to(values.dtype)


def _smoothed(targets: Tensor, smoothing: float, classes: int) -> Tensor:
    return targets * (1.0 - smoothing) + smoothing / classes if smoothing else targets


def mean_squared_error(targets: Tensor, predictions: Tensor) -> Tensor:
    targets, predictions = same_shape_and_dtype(targets, predictions)
    return functional.mse_loss(predictions, targets, reduction="none").mean(-1)


def mean_absolute_error(targets: Tensor, predictions: Tensor) -> Tensor:
    targets, predictions = same_shape_and_dtype(targets, predictions)
    return functional.l1_loss(predictions, targets, reduction="none").mean(-1)


def mean_absolute_percentage_error(targets: Tensor, predictions: Tensor) -> Tensor:
    targets, predictions = same_shape_and_dtype(targets, predictions)
    part = (targets - predictions) / targets.abs().clamp_min(EPSILON)
    return 100.0 * part.abs().mean(-1)


def mean_squared_logarithmic_error(targets: Tensor, predictions: Tensor) -> Tensor:
    targets, predictions = same_shape_and_dtype(targets, predictions)
    own, other = (torch.log1p(tensor.clamp_min(EPSILON)) for tensor in (predictions, targets))
    return (own - other).square().mean(-1)


def huber(targets: Tensor, predictions: Tensor, delta: float = 1.0) -> Tensor:
    targets, predictions = same_shape_and_dtype(targets, predictions)
    return functional.huber_loss(predictions, targets, reduction="none", delta=delta).mean(-1)


def log_cosh(targets: Tensor, predictions: Tensor) -> Tensor:
    targets, predictions = same_shape_and_dtype(targets, predictions)
    error = predictions - targets
    return (error + functional.softplus(-2.0 * error) - math.log(2.0)).mean(-1)


def cosine_similarity(targets: Tensor, predictions: Tensor, axis: int = -1) -> Tensor:
    return -cosine(targets, predictions, axis)


def cosine(targets: Tensor, predictions: Tensor, axis: int = -1) -> Tensor:
    """The cosine between targets and predictions."""
    targets, predictions = same_shape_and_dtype(targets, predictions)
    return (_unit(targets, axis) * _unit(predictions, axis)).sum(axis)


def _unit(vectors: Tensor, axis: int) -> Tensor:
    return functional.normalize(vectors, dim=axis, eps=1e-12)


def _signs(targets: Tensor) -> Tensor:
    """-1 and 1 for 0 and 1, where the targets are nothing else."""
    is_binary = ((targets == 0) | (targets == 1)).all()
    return torch.where(is_binary, 2.0 * targets - 1.0, targets)


def _short_of_margin(targets: Tensor, predictions: Tensor) -> Tensor:
    targets, predictions = same_shape_and_dtype(targets, predictions)
    return (1.0 - _signs(targets) * predictions).clamp_min(0.0)


def hinge(targets: Tensor, predictions: Tensor) -> Tensor:
    return _short_of_margin(targets, predictions).mean(-1)


def squared_hinge(targets: Tensor, predictions: Tensor) -> Tensor:
    return _short_of_margin(targets, predictions).square().mean(-1)


def categorical_hinge(targets: Tensor, predictions: Tensor) -> Tensor:
    targets, predictions = same_shape_and_dtype(targets, predictions)
    right = (targets * predictions).sum(-1)
    wrong = ((1.0 - targets) * predictions).amax(-1)
    return (wrong - right + 1.0).clamp_min(0.0)


def kl_divergence(targets: Tensor, predictions: Tensor) -> Tensor:
    targets, predictions = same_shape_and_dtype(targets, predictions)
    targets, predictions = targets.clamp(EPSILON, 1.0), predictions.clamp(EPSILON, 1.0)
    return (targets * (targets / predictions).log()).sum(-1)


def poisson(targets: Tensor, predictions: Tensor) -> Tensor:
    targets, predictions = same_shape_and_dtype(targets, predictions)
    return (predictions - targets * (predictions + EPSILON).log()).mean(-1)


def _binary(targets: Tensor, predictions: Tensor, from_logits: bool) -> Tensor:
    if from_logits:
        return functional.binary_cross_entropy_with_logits(predictions, targets, reduction="none")
    kept = predictions.clamp(EPSILON, 1.0 - EPSILON)
    return functional.binary_cross_entropy(kept, targets, reduction="none")


def binary_crossentropy(
    targets: Tensor,
    predictions: Tensor,
    from_logits: bool = False,
    label_smoothing: float = 0.0,
    axis: int = -1,
) -> Tensor:
    targets, predictions = same_shape_and_dtype(targets, predictions)
    return _binary(_smoothed(targets, label_smoothing, 2), predictions, from_logits).mean(axis)


def binary_focal_crossentropy(
    targets: Tensor,
    predictions: Tensor,
    apply_class_balancing: bool = False,
    alpha: float = 0.25,
    gamma: float = 2.0,
    from_logits: bool = False,
    label_smoothing: float = 0.0,
    axis: int = -1,
) -> Tensor:
    targets, predictions = same_shape_and_dtype(targets, predictions)
    targets = _smoothed(targets, label_smoothing, 2)
    predictions = predictions.sigmoid() if from_logits else predictions
    right = targets * predictions + (1.0 - targets) * (1.0 - predictions)
    focal = (1.0 - right).pow(gamma) * _binary(targets, predictions, from_logits=False)
    if apply_class_balancing:
        focal = (targets * alpha + (1.0 - targets) * (1.0 - alpha)) * focal
    return focal.mean(axis)


def _probabilities(predictions: Tensor, axis: int) -> Tensor:
    """Predictions that add up to 1, away from 0 and 1."""
    return (predictions / predictions.sum(axis, keepdim=True)).clamp(EPSILON, 1.0 - EPSILON)


def categorical_crossentropy(
    targets: Tensor,
    predictions: Tensor,
    from_logits: bool = False,
    label_smoothing: float = 0.0,
    axis: int = -1,
) -> Tensor:
    targets, predictions = same_shape_and_dtype(targets, predictions)
    targets = _smoothed(targets, label_smoothing, targets.shape[-1])
    if from_logits:
        logarithms = functional.log_softmax(predictions, axis)
    else:
        logarithms = _probabilities(predictions, axis).log()
    return -(targets * logarithms).sum(axis)


def categorical_focal_crossentropy(
    targets: Tensor,
    predictions: Tensor,
    alpha: float | list[float] = 0.25,
    gamma: float = 2.0,
    from_logits: bool = False,
    label_smoothing: float = 0.0,
    axis: int = -1,
) -> Tensor:
    targets, predictions = same_shape_and_dtype(targets, predictions)
    targets = _smoothed(targets, label_smoothing, targets.shape[-1])
    predictions = predictions.softmax(axis) if from_logits else predictions
    output = _probabilities(predictions, axis)
    weight = (1.0 - output).pow(gamma) * torch.as_tensor(
        alpha, dtype=output.dtype, device=output.device
    )
    return -(weight * targets * output.log()).sum(axis)


def sparse_categorical_crossentropy(
    targets: Tensor,
    predictions: Tensor,
    from_logits: bool = False,
    ignore_class: int | None = None,
    axis: int = -1,
) -> Tensor | Masked:
    scores, classes = scores_and_classes(targets, predictions, axis)
    if ignore_class is None:
        return _sparse(scores, classes, from_logits)
    counts = classes != ignore_class
    values = _sparse(
        torch.where(counts.unsqueeze(1), scores, 0.0), classes.where(counts, 0), from_logits
    )
    return Masked(values.where(counts, 0.0), counts)


def scores_and_classes(
    targets: Tensor, predictions: Tensor, axis: int = -1
) -> tuple[Tensor, Tensor]:
    """The predictions with the classes along axis 1, as torch wants them; and the targets' classes."""
    if targets.dim() == predictions.dim() and targets.shape[axis] == 1:
        targets = targets.squeeze(axis)
    scores = predictions if predictions.dim() == 2 else predictions.movedim(axis, 1)
    return scores, targets.long()


def _sparse(scores: Tensor, classes: Tensor, from_logits: bool) -> Tensor:
    if from_logits:
        return functional.cross_entropy(scores, classes, reduction="none")
    return functional.nll_loss(_probabilities(scores, 1).log(), classes, reduction="none")


def categorical_generalized_cross_entropy(
    targets: Tensor, predictions: Tensor, q: float = 0.5
) -> Tensor:
    if not 0.0 < q < 1.0:
        raise ValueError(f"q must be between 0 and 1, and is {q!r}")
    scores, classes = scores_and_classes(targets, predictions)
    right = scores.gather(1, classes.unsqueeze(1)).squeeze(1)
    return (1.0 - right.pow(q)) / q


def ctc(targets: Tensor, predictions: Tensor) -> Tensor:
    if targets.dim() != 2 or predictions.dim() != 3:
        raise SpecError(
            "loss: ctc needs targets of shape [samples, letters] and predictions of shape [samples, steps,"
            f" classes], and got {list(targets.shape)} and {list(predictions.shape)}."
        )
    samples, steps, _ = predictions.shape
    return functional.ctc_loss(
        functional.log_softmax(predictions.transpose(0, 1), -1),
        targets.long(),
        torch.full((samples,), steps),
        (targets != 0).sum(-1),
        reduction="none",
    )


def dice(targets: Tensor, predictions: Tensor, axis: int | tuple[int, ...] | None = None) -> Tensor:
    targets, predictions = same_shape_and_dtype(targets, predictions)
    both = 2.0 * _sum(targets * predictions, axis)
    return 1.0 - both / (_sum(targets, axis) + _sum(predictions, axis) + EPSILON)


def tversky(
    targets: Tensor,
    predictions: Tensor,
    alpha: float = 0.5,
    beta: float = 0.5,
    axis: int | tuple[int, ...] | None = None,
) -> Tensor:
    targets, predictions = same_shape_and_dtype(targets, predictions)
    both = _sum(targets * predictions, axis)
    missed = _sum((1.0 - predictions) * targets, axis)
    invented = _sum(predictions * (1.0 - targets), axis)
    return 1.0 - both / (both + missed * alpha + invented * beta + EPSILON)


def _sum(tensor: Tensor, axis: int | tuple[int, ...] | None) -> Tensor:
    return tensor.sum() if axis is None else tensor.sum(axis)


def circle(
    targets: Tensor,
    predictions: Tensor,
    gamma: float = 80.0,
    margin: float = 0.4,
    remove_diagonal: bool = True,
) -> Masked:
    distances = (1.0 - predictions @ predictions.T).clamp_min(0.0)
    labels = targets.reshape(-1, 1)
    same = labels == labels.T
    others = ~same
    if remove_diagonal:
        same = same & ~torch.eye(len(labels), dtype=torch.bool, device=labels.device)
    near = _exponents(-gamma * (margin + distances) * (margin - distances), same)
    weight = (1.0 + margin - distances).clamp_min(0.0)
    far = _exponents(gamma * weight * (1.0 - margin - distances), others)
    values = functional.softplus(near + far)
    return Masked(values, values > 0)


def _exponents(values: Tensor, mask: Tensor) -> Tensor:
    return values.masked_fill(~mask, -math.inf).logsumexp(1)


FUNCTIONS: dict[str, Callable[..., Tensor | Masked]] = {
    function.__name__: function
    for function in (
        mean_squared_error,
        mean_absolute_error,
        mean_absolute_percentage_error,
        mean_squared_logarithmic_error,
        cosine_similarity,
        huber,
        log_cosh,
        hinge,
        squared_hinge,
        categorical_hinge,
        kl_divergence,
        poisson,
        binary_crossentropy,
        binary_focal_crossentropy,
        categorical_crossentropy,
        categorical_focal_crossentropy,
        sparse_categorical_crossentropy,
        categorical_generalized_cross_entropy,
        ctc,
        dice,
        tversky,
        circle,
    )
}
