"""Keras' named losses as torch functions, for native models; the values equal Keras'.

Unless a function says otherwise, targets and predictions have shape `[samples, ..., outputs]`, and the result
has shape `[samples, ...]`, in the predictions' dtype. Sparse targets are classes (integers), `[samples, ...]`
or `[samples, ..., 1]`. Options have Keras' names.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from isotrain.adapters.common import class_targets
from isotrain.adapters.torch.base.binary_cross_entropy import probability_loss
from isotrain.adapters.torch.base.require_all import require_all
from isotrain.adapters.torch.loss.shapes import classes_and_scores, same_shape_and_dtype
from isotrain.plugin import SpecError

MEAN_REDUCTIONS = ("sum_over_batch_size", "mean", "mean_with_sample_weight")
"""Keras' names of the reductions of loss values to a mean."""
EPSILON = 1e-7
"""Keras' epsilon, which keeps logarithms and quotients away from 0."""
NO_CLASS = -(2**63)
"""`ignore_index` of torch's cross-entropies with which they refuse every target that is no class."""


class Masked(NamedTuple):
    """Loss values of which some do not count.

    Attributes:
        values: Loss values, shape `[samples, ...]`.
        mask: True for the values that count, same shape, bool.
    """

    values: Tensor
    mask: Tensor


def _smoothed(
    targets: Tensor, predictions: Tensor, smoothing: float, classes: int | None = None
) -> tuple[Tensor, Tensor]:
    """Targets and predictions as from `same_shape_and_dtype`, with label smoothing.

    Args:
        targets: Target probabilities, shape of the predictions.
        predictions: Predictions, any shape.
        smoothing: Fraction of the probability that is spread over all classes.
        classes: Number of classes; None for the length of the last axis.
    """
    targets, predictions = same_shape_and_dtype(targets, predictions)
    if smoothing:
        targets = targets * (1.0 - smoothing) + smoothing / (classes or targets.shape[-1])
    return targets, predictions


def mean_squared_error(targets: Tensor, predictions: Tensor) -> Tensor:
    """Mean over the outputs of the squared error, shape `[samples, ...]`."""
    targets, predictions = same_shape_and_dtype(targets, predictions)
    return functional.mse_loss(predictions, targets, reduction="none").mean(-1)


def mean_absolute_error(targets: Tensor, predictions: Tensor) -> Tensor:
    """Mean over the outputs of the absolute error, shape `[samples, ...]`."""
    targets, predictions = same_shape_and_dtype(targets, predictions)
    return functional.l1_loss(predictions, targets, reduction="none").mean(-1)


def mean_absolute_percentage_error(targets: Tensor, predictions: Tensor) -> Tensor:
    """Mean over the outputs of the absolute error in percent, shape `[samples, ...]`."""
    targets, predictions = same_shape_and_dtype(targets, predictions)
    error = (targets - predictions) / targets.abs().clamp_min(EPSILON)
    return 100.0 * error.abs().mean(-1)


def mean_squared_logarithmic_error(targets: Tensor, predictions: Tensor) -> Tensor:
    """Mean over the outputs of the squared error of `log(1 + x)`, shape `[samples, ...]`."""
    targets, predictions = same_shape_and_dtype(targets, predictions)
    log_predictions, log_targets = (
        torch.log1p(tensor.clamp_min(EPSILON)) for tensor in (predictions, targets)
    )
    return (log_predictions - log_targets).square().mean(-1)


def huber(targets: Tensor, predictions: Tensor, delta: float = 1.0) -> Tensor:
    """Huber loss, a mean over the outputs, shape `[samples, ...]`."""
    targets, predictions = same_shape_and_dtype(targets, predictions)
    return functional.huber_loss(predictions, targets, reduction="none", delta=delta).mean(-1)


def log_cosh(targets: Tensor, predictions: Tensor) -> Tensor:
    """Logarithm of the error's hyperbolic cosine, a mean over the outputs, shape `[samples, ...]`."""
    targets, predictions = same_shape_and_dtype(targets, predictions)
    error = predictions - targets
    return (error + functional.softplus(-2.0 * error) - math.log(2.0)).mean(-1)


def cosine_similarity(targets: Tensor, predictions: Tensor, axis: int = -1) -> Tensor:
    """Cosine loss: the negative of `cosine`, shape `[samples, ...]`."""
    return -cosine(targets, predictions, axis)


def cosine(targets: Tensor, predictions: Tensor, axis: int = -1) -> Tensor:
    """Cosine of the angle between targets and predictions along an axis: shape without that axis."""
    targets, predictions = same_shape_and_dtype(targets, predictions)
    return (_unit(targets, axis) * _unit(predictions, axis)).sum(axis)


def _unit(vectors: Tensor, axis: int) -> Tensor:
    """Vectors along an axis divided by their lengths; any shape."""
    return functional.normalize(vectors, dim=axis, eps=1e-12)


def _signs(targets: Tensor) -> Tensor:
    """Targets with 0 and 1 mapped to -1 and 1, if they contain nothing else; any shape."""
    is_binary = ((targets == 0) | (targets == 1)).all()
    return torch.where(is_binary, 2.0 * targets - 1.0, targets)


def _hinge_values(targets: Tensor, predictions: Tensor) -> Tensor:
    """Hinge loss of each element, in the predictions' shape."""
    targets, predictions = same_shape_and_dtype(targets, predictions)
    return (1.0 - _signs(targets) * predictions).clamp_min(0.0)


def hinge(targets: Tensor, predictions: Tensor) -> Tensor:
    """Hinge loss, a mean over the outputs, shape `[samples, ...]`."""
    return _hinge_values(targets, predictions).mean(-1)


def squared_hinge(targets: Tensor, predictions: Tensor) -> Tensor:
    """Squared hinge loss, a mean over the outputs, shape `[samples, ...]`."""
    return _hinge_values(targets, predictions).square().mean(-1)


def categorical_hinge(targets: Tensor, predictions: Tensor) -> Tensor:
    """Hinge loss of the target class and the best other class, shape `[samples, ...]`."""
    targets, predictions = same_shape_and_dtype(targets, predictions)
    positive = (targets * predictions).sum(-1)
    negative = ((1.0 - targets) * predictions).amax(-1)
    return (negative - positive + 1.0).clamp_min(0.0)


def kl_divergence(targets: Tensor, predictions: Tensor) -> Tensor:
    """Kullback-Leibler divergence of the targets from the predictions, shape `[samples, ...]`."""
    targets, predictions = same_shape_and_dtype(targets, predictions)
    targets, predictions = targets.clamp(EPSILON, 1.0), predictions.clamp(EPSILON, 1.0)
    return (targets * (targets / predictions).log()).sum(-1)


def poisson(targets: Tensor, predictions: Tensor) -> Tensor:
    """Poisson loss, a mean over the outputs, shape `[samples, ...]`."""
    targets, predictions = same_shape_and_dtype(targets, predictions)
    return (predictions - targets * (predictions + EPSILON).log()).mean(-1)


def _binary(targets: Tensor, predictions: Tensor, from_logits: bool) -> Tensor:
    """Binary cross-entropy of each element, in the shape of targets and predictions, which is equal."""
    if from_logits:
        return functional.binary_cross_entropy_with_logits(predictions, targets, reduction="none")
    return probability_loss(predictions.clamp(EPSILON, 1.0 - EPSILON), targets)


def binary_crossentropy(
    targets: Tensor,
    predictions: Tensor,
    from_logits: bool = False,
    label_smoothing: float = 0.0,
    axis: int = -1,
) -> Tensor:
    """Binary cross-entropy, a mean along `axis`: shape without that axis."""
    targets, predictions = _smoothed(targets, predictions, label_smoothing, 2)
    return _binary(targets, predictions, from_logits).mean(axis)


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
    """Binary focal cross-entropy, a mean along `axis`: shape without that axis."""
    targets, predictions = _smoothed(targets, predictions, label_smoothing, 2)
    predictions = predictions.sigmoid() if from_logits else predictions
    target_probability = targets * predictions + (1.0 - targets) * (1.0 - predictions)
    focal = (1.0 - target_probability).pow(gamma) * _binary(targets, predictions, from_logits=False)
    if apply_class_balancing:
        focal = (targets * alpha + (1.0 - targets) * (1.0 - alpha)) * focal
    return focal.mean(axis)


def _probabilities(predictions: Tensor, axis: int) -> Tensor:
    """Predictions normalised to a sum of 1 along an axis, then clamped away from 0 and 1; any shape."""
    return (predictions / predictions.sum(axis, keepdim=True)).clamp(EPSILON, 1.0 - EPSILON)


def categorical_crossentropy(
    targets: Tensor,
    predictions: Tensor,
    from_logits: bool = False,
    label_smoothing: float = 0.0,
    axis: int = -1,
) -> Tensor:
    """Cross-entropy with target probabilities along `axis`: shape without that axis."""
    targets, predictions = _smoothed(targets, predictions, label_smoothing)
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
    """Focal cross-entropy with target probabilities along `axis`: shape without that axis."""
    targets, predictions = _smoothed(targets, predictions, label_smoothing)
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
    """Cross-entropy with target classes, shape `[samples, ...]`."""
    return _sparse_named("loss", targets, predictions, from_logits, ignore_class, axis)


def sparse_categorical_crossentropy_metric(
    targets: Tensor,
    predictions: Tensor,
    from_logits: bool = False,
    ignore_class: int | None = None,
    axis: int = -1,
) -> Tensor | Masked:
    """`sparse_categorical_crossentropy`, whose error for what is no class names the metric."""
    return _sparse_named("metrics", targets, predictions, from_logits, ignore_class, axis)


def _sparse_named(
    field: str,
    targets: Tensor,
    predictions: Tensor,
    from_logits: bool,
    ignore_class: int | None,
    axis: int,
) -> Tensor | Masked:
    """Cross-entropy with target classes, shape `[samples, ...]`; a spec field, for the error."""
    classes, scores = classes_and_scores(targets, predictions, axis)
    try:
        if ignore_class is None:
            return _sparse(scores, classes, from_logits)
        mask = classes != ignore_class
        values = _sparse(
            torch.where(mask.unsqueeze(1), scores, 0.0), classes.where(mask, 0), from_logits
        )
    except IndexError as error:
        raise _naming_classes(field, error, scores) from None
    return Masked(values.where(mask, 0.0), mask)


def mean_sparse_categorical_crossentropy(scores: Tensor, classes: Tensor) -> Tensor:
    """Mean cross-entropy of logits, from the results of `classes_and_scores`; a scalar."""
    try:
        return functional.cross_entropy(scores, classes, ignore_index=NO_CLASS)
    except IndexError as error:
        raise _naming_classes("loss", error, scores) from None


def _naming_classes(field: str, error: IndexError, scores: Tensor) -> Exception:
    """The error for a target that is no class of `[samples, classes, ...]`; another error as it is."""
    target = class_targets.invalid_class(error)
    if target is None:
        return error
    name = "sparse_categorical_crossentropy"
    return class_targets.received(class_targets.expectation(field, name, scores.shape[1]), target)


def class_loss(targets: Tensor, predictions: Tensor, from_logits: bool, axis: int) -> Tensor:
    """Cross-entropy with target classes, shape `[samples, ...]`; every target must be a class."""
    classes, scores = classes_and_scores(targets, predictions, axis)
    return _sparse(scores, classes, from_logits)


def _sparse(scores: Tensor, classes: Tensor, from_logits: bool) -> Tensor:
    """Cross-entropy of each position, `[samples, ...]`, from the results of `classes_and_scores`."""
    if from_logits:
        return functional.cross_entropy(scores, classes, ignore_index=NO_CLASS, reduction="none")
    logarithms = _probabilities(scores, 1).log()
    return functional.nll_loss(logarithms, classes, ignore_index=NO_CLASS, reduction="none")


def categorical_generalized_cross_entropy(
    targets: Tensor, predictions: Tensor, q: float = 0.5
) -> Tensor:
    """Generalized cross-entropy of probabilities with target classes, shape `[samples, ...]`.

    Raises:
        ValueError: `q` is not between 0 and 1.
    """
    if not 0.0 < q < 1.0:
        raise ValueError(f"q: expected a number between 0 and 1, got {q!r}")
    classes, scores = classes_and_scores(targets, predictions)
    require_all(
        (classes >= 0) & (classes < scores.shape[1]),
        classes,
        class_targets.expectation("loss", "categorical_generalized_cross_entropy", scores.shape[1]),
    )
    target_probability = scores.gather(1, classes.unsqueeze(1)).squeeze(1)
    return (1.0 - target_probability.pow(q)) / q


def ctc(targets: Tensor, predictions: Tensor) -> Tensor:
    """CTC loss, shape `[samples]`.

    Args:
        targets: Labels, integers `[samples, letters]`; 0 is blank and pads.
        predictions: Logits, shape `[samples, steps, classes]`.

    Raises:
        SpecError: The ranks differ from these, a label is no class, or the labels do not fit into the steps.
    """
    if targets.dim() != 2 or predictions.dim() != 3:
        raise SpecError(
            "loss: ctc expected targets of shape [samples, letters] and predictions of shape [samples, steps,"
            f" classes], got {list(targets.shape)} and {list(predictions.shape)}."
        )
    samples, steps, classes = predictions.shape
    labels, lengths = targets.long(), (targets != 0).sum(-1)
    is_label = torch.arange(labels.shape[1], device=labels.device) < lengths.unsqueeze(1)
    is_class = (labels > 0) & (labels < classes)
    require_all(is_class | ~is_label, labels, class_targets.ctc_labels(classes))
    again = (labels[:, 1:] == labels[:, :-1]) & is_label[:, 1:]
    needed = lengths + again.sum(-1)
    require_all(needed <= steps, needed, class_targets.CTC_FIT)
    return functional.ctc_loss(
        functional.log_softmax(predictions.transpose(0, 1), -1),
        labels,
        torch.full((samples,), steps),
        lengths,
        reduction="none",
    )


def dice(targets: Tensor, predictions: Tensor, axis: int | tuple[int, ...] | None = None) -> Tensor:
    """Dice loss, a scalar; with `axis`, without these axes."""
    targets, predictions = same_shape_and_dtype(targets, predictions)
    intersection = 2.0 * _sum(targets * predictions, axis)
    return 1.0 - intersection / (_sum(targets, axis) + _sum(predictions, axis) + EPSILON)


def tversky(
    targets: Tensor,
    predictions: Tensor,
    alpha: float = 0.5,
    beta: float = 0.5,
    axis: int | tuple[int, ...] | None = None,
) -> Tensor:
    """Tversky loss, a scalar; with `axis`, without these axes. As Keras: `alpha` weighs false negatives."""
    targets, predictions = same_shape_and_dtype(targets, predictions)
    true_positives = _sum(targets * predictions, axis)
    false_negatives = _sum((1.0 - predictions) * targets, axis)
    false_positives = _sum(predictions * (1.0 - targets), axis)
    return 1.0 - true_positives / (
        true_positives + false_negatives * alpha + false_positives * beta + EPSILON
    )


def _sum(tensor: Tensor, axis: int | tuple[int, ...] | None) -> Tensor:
    """Sum over axes, or over all if `axis` is None, a scalar then."""
    return tensor.sum() if axis is None else tensor.sum(axis)


def circle(
    targets: Tensor,
    predictions: Tensor,
    gamma: float = 80.0,
    margin: float = 0.4,
    remove_diagonal: bool = True,
) -> Masked:
    """Circle loss of pairs in a slice; samples with a loss of 0 do not count.

    Args:
        targets: Labels, shape `[samples]` or `[samples, 1]`.
        predictions: Normalised embeddings, shape `[samples, features]`.
        gamma: Scale.
        margin: Relaxation of the pair similarities.
        remove_diagonal: Whether to leave out the pair of a sample with itself.
    """
    distances = (1.0 - predictions @ predictions.T).clamp_min(0.0)
    labels = targets.reshape(-1, 1)
    is_positive = labels == labels.T
    is_negative = ~is_positive
    if remove_diagonal:
        is_positive = is_positive & ~torch.eye(len(labels), dtype=torch.bool, device=labels.device)
    positive = _masked_logsumexp(-gamma * (margin + distances) * (margin - distances), is_positive)
    weight = (1.0 + margin - distances).clamp_min(0.0)
    negative = _masked_logsumexp(gamma * weight * (1.0 - margin - distances), is_negative)
    values = functional.softplus(positive + negative)
    return Masked(values, values > 0)


def _masked_logsumexp(values: Tensor, mask: Tensor) -> Tensor:
    """Log-sum-exp over axis 1 of the values where the mask is true; both `[samples, samples]`."""
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
