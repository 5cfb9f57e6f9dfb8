"""Metrics of native models that are made of true and false positives and negatives."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from isotrain.adapters.torch.loss.functional import broadcast_weights, same_shape
from isotrain.adapters.torch.metrics.base import Metric
from isotrain.plugin import SpecError


class ConfusionMetric(Metric):
    """What is made of the true and false positives and negatives at one or several thresholds."""

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
            number: From true positives, false positives, true negatives and false negatives, each of shape
                `[thresholds]`, to the number.
            name: Under which it is given.
            device: Where to count.
            thresholds: A prediction above one is positive.
            top_k: Only so many of a sample's highest predictions can be positive.
            class_id: The only class that counts.
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
        targets, predictions = same_shape(targets, self._scored(predictions))
        if predictions.dim() < 2 and (self._top_k is not None or self._class is not None):
            raise SpecError(
                f"metric {self.name}: class_id and top_k choose among classes along the last axis; the"
                f" predictions have shape {list(predictions.shape)}. Give each sample a row of classes, or"
                " leave these options out."
            )
        if self._top_k is not None:
            predictions = _only_highest(predictions, self._top_k)
        if self._class is not None:
            targets, predictions = targets[..., self._class], predictions[..., self._class]
        if weights is not None:
            weights = broadcast_weights(weights, targets.double()).expand_as(targets).reshape(1, -1)
        true, scores = targets.reshape(1, -1).bool(), predictions.reshape(1, -1)
        self.sums[0].add_(confusion(true, scores > self._thresholds.to(scores.dtype), weights))

    def _scored(self, predictions: Tensor) -> Tensor:
        """What is compared to thresholds."""
        return predictions

    def named_results(self) -> dict[str, float]:
        numbers = self._number(*self.sums[0]).reshape(-1).tolist()
        if len(numbers) == 1:
            return {self.name: numbers[0]}
        return {f"{self.name}/{place}": number for place, number in enumerate(numbers)}


class ConfusionMetricFromLogits(ConfusionMetric):
    """The same, of predictions that are logits."""

    def _scored(self, predictions: Tensor) -> Tensor:
        return predictions.sigmoid()


def confusion(true: Tensor, positive: Tensor, weights: Tensor | None) -> Tensor:
    """True positives, false positives, true negatives and false negatives, each of them summed over axis 1.

    Args:
        true: Whether targets are positive.
        positive: Whether predictions are, of shape `[thresholds, samples, ...]`.
        weights: By which samples count; None where all count alike.
    """
    pairs = ((true, positive), (~true, positive), (~true, ~positive), (true, ~positive))
    return torch.stack([summed(one & other, weights) for one, other in pairs])


def summed(values: Tensor, weights: Tensor | None) -> Tensor:
    """Over axis 1, each value times the weight of its sample."""
    return values.sum(1) if weights is None else (values * weights).sum(1)


def _only_highest(predictions: Tensor, k: int) -> Tensor:
    values, places = predictions.topk(k)
    return torch.full_like(predictions, -1e10).scatter(-1, places, values)


def ratio(part: Tensor, rest: Tensor) -> Tensor:
    """part / (part + rest), 0 where both are 0."""
    return torch.where(part > 0, part / (part + rest), 0.0)


def precision(tp: Tensor, fp: Tensor, tn: Tensor, fn: Tensor) -> Tensor:
    return ratio(tp, fp)


def recall(tp: Tensor, fp: Tensor, tn: Tensor, fn: Tensor) -> Tensor:
    return ratio(tp, fn)


def specificity(tp: Tensor, fp: Tensor, tn: Tensor, fn: Tensor) -> Tensor:
    return ratio(tn, fp)


def max_where_at_least(
    number: Callable[..., Tensor], where: Callable[..., Tensor], least: float
) -> Callable[..., Tensor]:
    """The highest of a number over the thresholds at which another one is at least so high."""

    def found(*counts: Tensor) -> Tensor:
        return torch.where(where(*counts) >= least, number(*counts), 0.0).max()

    return found
