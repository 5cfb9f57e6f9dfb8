"""Metrics of native models from true and false positives and negatives (the confusion matrix)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from isotrain.adapters.torch.loss.shapes import broadcast_weights, same_shape
from isotrain.adapters.torch.metrics.base import Metric
from isotrain.plugin import SpecError


class ConfusionMetric(Metric):
    """A function of true and false positives and negatives, counted at one or more thresholds."""

    def __init__(
        self,
        number: Callable[..., Tensor],
        name: str,
        device: torch.device,
        thresholds: Sequence[float],
        top_k: int | None = None,
        class_id: int | None = None,
    ) -> None:
        """Starts with no samples.

        Args:
            number: Function of true positives, false positives, true negatives and false negatives, each
                `[thresholds]`, float64; returns the result, a scalar or `[thresholds]`.
            name: Name of the result.
            device: Device of the counts.
            thresholds: Thresholds above which a prediction is positive.
            top_k: Number of highest predictions per sample that can be positive; None for all.
            class_id: Class that alone is counted; None for all.
        """
        self.name = name
        self._number = number
        self._top_k = top_k
        self._class = class_id
        self._thresholds = torch.tensor(thresholds, dtype=torch.float64, device=device)[:, None]
        self.sums = [torch.zeros(4, len(thresholds), dtype=torch.float64, device=device)]

    def update(self, targets: Any, predictions: Any, count: int) -> None:
        self._count(targets, predictions, None)

    def update_weighted(self, targets: Any, predictions: Any, weights: Any) -> None:
        self._count(targets, predictions, weights)

    def _count(self, targets: Tensor, predictions: Tensor, weights: Tensor | None) -> None:
        """Adds the counts of samples, shape `[samples, ...]`, at each threshold."""
        targets, predictions = same_shape(targets, self._scores(predictions))
        if predictions.dim() < 2 and (self._top_k is not None or self._class is not None):
            raise SpecError(
                f"metric {self.name}: class_id and top_k choose among classes along the last axis, and the"
                f" predictions have shape {list(predictions.shape)}; expected [samples, classes]. Change the"
                " model's output, or leave these options out."
            )
        if self._top_k is not None:
            predictions = _only_top_k(predictions, self._top_k)
        if self._class is not None:
            targets, predictions = targets[..., self._class], predictions[..., self._class]
        if weights is not None:
            weights = broadcast_weights(weights, targets.double()).expand_as(targets).reshape(1, -1)
        true, scores = targets.reshape(1, -1).bool(), predictions.reshape(1, -1)
        self.sums[0].add_(confusion(true, scores > self._thresholds.to(scores.dtype), weights))

    def _scores(self, predictions: Tensor) -> Tensor:
        """Values to compare with the thresholds, same shape."""
        return predictions

    def named_results(self) -> dict[str, float]:
        numbers = self._number(*self.sums[0]).reshape(-1).tolist()
        if len(numbers) == 1:
            return {self.name: numbers[0]}
        return {f"{self.name}/{index}": number for index, number in enumerate(numbers)}


class ConfusionMetricFromLogits(ConfusionMetric):
    """Confusion metric of predictions that are logits."""

    def _scores(self, predictions: Tensor) -> Tensor:
        return predictions.sigmoid()


def confusion(true: Tensor, positive: Tensor, weights: Tensor | None) -> Tensor:
    """True positives, false positives, true negatives and false negatives, shape `[4, thresholds, ...]`.

    Args:
        true: Whether targets are positive, bool, broadcastable to `positive`.
        positive: Whether predictions are positive, bool, shape `[thresholds, samples, ...]`.
        weights: Sample weights, broadcastable to `positive`; None for ones.
    """
    pairs = ((true, positive), (~true, positive), (~true, ~positive), (true, ~positive))
    return torch.stack([weighted_sum(a & b, weights) for a, b in pairs])


def weighted_sum(values: Tensor, weights: Tensor | None) -> Tensor:
    """Sum over axis 1 (samples), each value times its sample's weight: `[n, samples]` to `[n]`."""
    return values.sum(1) if weights is None else (values * weights).sum(1)


def _only_top_k(predictions: Tensor, k: int) -> Tensor:
    """Predictions with all but the k highest of the last axis set to -1e10; same shape."""
    values, indices = predictions.topk(k)
    return torch.full_like(predictions, -1e10).scatter(-1, indices, values)


def ratio(part: Tensor, rest: Tensor) -> Tensor:
    """Elementwise `part / (part + rest)`, any shape; 0 where `part` is 0."""
    return torch.where(part > 0, part / (part + rest), 0.0)


def precision(tp: Tensor, fp: Tensor, tn: Tensor, fn: Tensor) -> Tensor:
    """Precision at each threshold: counts and result of shape `[thresholds]`."""
    return ratio(tp, fp)


def recall(tp: Tensor, fp: Tensor, tn: Tensor, fn: Tensor) -> Tensor:
    """Recall (sensitivity) at each threshold: counts and result of shape `[thresholds]`."""
    return ratio(tp, fn)


def specificity(tp: Tensor, fp: Tensor, tn: Tensor, fn: Tensor) -> Tensor:
    """Specificity at each threshold: counts and result of shape `[thresholds]`."""
    return ratio(tn, fp)


def max_where_at_least(
    number: Callable[..., Tensor], constrained: Callable[..., Tensor], least: float
) -> Callable[..., Tensor]:
    """Function of counts `[thresholds]`: maximum of `number` where `constrained` is at least `least`."""

    def maximum(*counts: Tensor) -> Tensor:
        return torch.where(constrained(*counts) >= least, number(*counts), 0.0).max()

    return maximum
