"""Metrics of native models with sums per class; the first batch determines the number of classes."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from isotrain.adapters.torch.loss.shapes import broadcast_weights, same_shape
from isotrain.adapters.torch.metrics.base import LazyMetric
from isotrain.adapters.torch.metrics.confusion import confusion, weighted_sum
from isotrain.plugin import SpecError, UnsupportedError

_EPSILON = 1e-7


class PerClassMetric(LazyMetric):
    """Base of metrics with sums per class, of targets and predictions of shape `[samples, classes]`."""

    def __init__(
        self, name: str, device: torch.device, rows: Sequence[int], classes: int | None = None
    ) -> None:
        """Starts with no samples.

        Args:
            name: Name of the result.
            device: Device of the sums.
            rows: Shape of the sums of one class.
            classes: Number of classes; None to take it from the first batch.
        """
        super().__init__()
        self.name = name
        self._device = device
        self._rows = rows
        self.sums: list[Tensor] = []
        if classes is not None:
            self._build(classes)

    def _build(self, classes: int) -> None:
        self.sums.append(
            torch.zeros(*self._rows, classes, dtype=torch.float64, device=self._device)
        )
        self.write_pending()

    @property
    def is_unbuilt(self) -> bool:
        return not self.sums

    def ensure_built(self, targets: Any, predictions: Any) -> None:
        if self.is_unbuilt:
            self._build(predictions.shape[-1] if predictions.dim() > 1 else 1)

    def require_sums(self) -> None:
        if self.is_unbuilt:
            raise UnsupportedError(
                f"metrics: {self.name} creates its sums at the first batch, and cannot be added up over the"
                " workers of a parameter-server run. Leave it out, or use a function of your own, whose"
                " values are averaged."
            )

    def update(self, targets: Any, predictions: Any, count: int) -> None:
        self._add(targets, predictions, None)

    def update_weighted(self, targets: Any, predictions: Any, weights: Any) -> None:
        self._add(targets, predictions, weights)

    def _add(self, targets: Tensor, predictions: Tensor, weights: Tensor | None) -> None:
        """Adds samples of shape `[samples, classes]`, or `[samples]` for one class."""
        if targets.dim() == predictions.dim() == 1:
            targets, predictions = targets.unsqueeze(1), predictions.unsqueeze(1)
        targets, predictions = same_shape(targets, predictions)
        self._require_classes(predictions)
        self.ensure_built(targets, predictions)
        if weights is not None:
            weights = broadcast_weights(weights, targets.double())
        self.sums[0].add_(self._increments(targets, predictions, weights))

    def _require_classes(self, predictions: Tensor) -> None:
        """Refuses predictions that are not of shape `[samples, classes]`."""
        classes = "classes" if self.is_unbuilt else self.sums[0].shape[-1]
        if predictions.dim() != 2 or classes not in ("classes", predictions.shape[1]):
            raise SpecError(
                f"metrics: {self.name} takes predictions of shape [samples, {classes}], got"
                f" {list(predictions.shape)}."
            )

    def named_results(self) -> dict[str, float]:
        numbers = self._number(self.sums[0]).reshape(-1).tolist() if self.sums else [0.0]
        if len(numbers) == 1:
            return {self.name: numbers[0]}
        return {f"{self.name}/{index}": number for index, number in enumerate(numbers)}

    @abstractmethod
    def _increments(self, targets: Tensor, predictions: Tensor, weights: Tensor | None) -> Tensor:
        """Increments of the sums by a batch, shape `[*rows, classes]`; weights have shape `[samples, 1]`."""

    @abstractmethod
    def _number(self, total: Tensor) -> Tensor:
        """Result from the sums `[*rows, classes]`: a scalar, or one number per class."""


class FScore(PerClassMetric):
    """F-beta score: weighted harmonic mean of precision and recall."""

    def __init__(
        self,
        device: torch.device,
        name: str,
        average: str | None = None,
        beta: float = 1.0,
        threshold: float | None = None,
        dtype: Any = None,
    ) -> None:
        """Starts with no samples.

        Raises:
            ValueError: An option has an invalid value.
        """
        if average not in (None, "micro", "macro", "weighted"):
            raise ValueError(f"average: expected micro, macro or weighted, got {average!r}")
        if beta <= 0 or not 0 < (1.0 if threshold is None else threshold) <= 1:
            raise ValueError("expected beta above 0, and threshold above 0 and up to 1")
        super().__init__(name, device, (3,))
        self._average, self._beta, self._threshold = average, beta, threshold

    def _increments(self, targets: Tensor, predictions: Tensor, weights: Tensor | None) -> Tensor:
        if self._threshold is None:
            highest = predictions.amax(-1, keepdim=True)
            positive = (predictions >= highest) & (predictions.abs() > 1e-9)
        else:
            positive = predictions > self._threshold
        true, positive = targets.to(torch.float64), positive.to(torch.float64)
        return weighted_sum(torch.stack([positive * true, positive, true]), weights)

    def _number(self, total: Tensor) -> Tensor:
        hits, positive, true = total.sum(-1, keepdim=True) if self._average == "micro" else total
        precision, recall = hits / (positive + _EPSILON), hits / (true + _EPSILON)
        square = self._beta**2
        scores = precision * recall / (square * precision + recall + _EPSILON) * (1 + square)
        if self._average == "weighted":
            return (scores * (true / (true.sum() + _EPSILON))).sum()
        return scores if self._average is None else scores.mean()


def f1_score(
    device: torch.device,
    name: str,
    average: str | None = None,
    threshold: float | None = None,
    dtype: Any = None,
) -> FScore:
    """F1 score: harmonic mean of precision and recall."""
    return FScore(device, name, average, 1.0, threshold)


class R2Score(PerClassMetric):
    """R2 score: part of the targets' variance that the predictions explain."""

    def __init__(
        self,
        device: torch.device,
        name: str,
        class_aggregation: str | None = "uniform_average",
        num_regressors: int = 0,
        dtype: Any = None,
    ) -> None:
        """Starts with no samples.

        Raises:
            ValueError: An option has an invalid value.
        """
        aggregations = (None, "uniform_average", "variance_weighted_average")
        if class_aggregation not in aggregations or num_regressors < 0:
            raise ValueError(
                f"expected class_aggregation of {aggregations}, num_regressors of 0 or more"
            )
        super().__init__(name, device, (5,))
        self._aggregation, self._regressors = class_aggregation, num_regressors

    def _increments(self, targets: Tensor, predictions: Tensor, weights: Tensor | None) -> Tensor:
        true = targets.to(torch.float64)
        errors = (true - predictions).square()
        ones = torch.ones_like(errors)
        sums = weighted_sum(torch.stack([true, true.square(), errors, ones]), weights)
        return torch.cat([sums, ones.sum(0, keepdim=True)])

    def _number(self, total: Tensor) -> Tensor:
        sums, squares, errors, counts, samples = total
        variation = squares - sums * (sums / counts)
        scores = 1 - errors / variation
        scores = torch.where(scores.isinf(), 0.0, scores)
        if self._aggregation == "uniform_average":
            scores = scores.mean()
        elif self._aggregation is not None:
            scores = (variation * scores).sum() / variation.sum()
        return self._adjusted(scores, samples.sum())

    def _adjusted(self, scores: Tensor, samples: Tensor) -> Tensor:
        """Adjusted R2, in the shape of `scores`, for the number of regressors; `samples` is a scalar."""
        degrees = samples - 1 - self._regressors
        if not self._regressors or degrees <= 0:
            return scores
        return 1 - (1 - scores) * (samples - 1) / degrees


class ConfusionMetricPerLabel(PerClassMetric):
    """A function of true and false positives and negatives of each label, counted at several thresholds."""

    def __init__(
        self,
        number: Callable[[Tensor], Tensor],
        name: str,
        device: torch.device,
        thresholds: Sequence[float],
        labels: int | None,
        scored: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        """Starts with no samples.

        Args:
            number: Function of the counts tp, fp, tn and fn, shape `[4, thresholds, labels]`, that returns
                the result.
            name: Name of the result.
            device: Device of the counts.
            thresholds: Thresholds above which a prediction is positive.
            labels: Number of labels; None to take it from the first batch.
            scored: Function from predictions to scores, which are compared with the thresholds; None for the
                predictions themselves.
        """
        super().__init__(name, device, (4, len(thresholds)), labels)
        self._function, self._scored = number, scored
        self._thresholds = torch.tensor(thresholds, dtype=torch.float64, device=device)

    def _increments(self, targets: Tensor, predictions: Tensor, weights: Tensor | None) -> Tensor:
        scores = self._scored(predictions) if self._scored else predictions
        positive = scores > self._thresholds.to(scores.dtype)[:, None, None]
        return confusion(targets.bool(), positive, weights)

    def _number(self, total: Tensor) -> Tensor:
        return self._function(total)
