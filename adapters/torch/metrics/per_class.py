"""Metrics of native models that add up for each class: how many there are, the first samples show."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from isotrain.adapters.torch.loss.functional import broadcast_weights, same_shape
from isotrain.adapters.torch.metrics.base import LazyMetric
from isotrain.adapters.torch.metrics.confusion import confusion, summed
from isotrain.plugin import SpecError, UnsupportedError

_SMALL = 1e-7


class PerClassMetric(LazyMetric):
    """Sums for each class of targets and predictions of shape `[samples, classes]`."""

    def __init__(
        self, name: str, device: torch.device, rows: Sequence[int], classes: int | None = None
    ) -> None:
        """Starts with no samples.

        Args:
            name: Under which the number is given.
            device: Where to add up.
            rows: The shape of what is added up for each class.
            classes: How many; None where the first samples show it.
        """
        super().__init__()
        self.name = name
        self._device = device
        self._rows = rows
        self.sums: list[Tensor] = []
        if classes is not None:
            self._begin(classes)

    def _begin(self, classes: int) -> None:
        self.sums.append(
            torch.zeros(*self._rows, classes, dtype=torch.float64, device=self._device)
        )
        self.write_pending()

    @property
    def is_unbuilt(self) -> bool:
        return not self.sums

    def ensure_built(self, targets: Any, predictions: Any) -> None:
        if self.is_unbuilt:
            self._begin(predictions.shape[-1] if predictions.dim() > 1 else 1)

    def require_sums(self) -> None:
        if self.is_unbuilt:
            raise UnsupportedError(
                f"metrics: {self.name} makes its sums when it sees samples, and cannot be added up over the"
                " workers of a parameter-server run. Leave it out, or give a function of your"
                " own, whose values are"
                " averaged."
            )

    def update(self, targets: Any, predictions: Any, count: int) -> None:
        self._add(targets, predictions, None)

    def update_weighted(self, targets: Any, predictions: Any, weights: Any) -> None:
        self._add(targets, predictions, weights)

    def _add(self, targets: Tensor, predictions: Tensor, weights: Tensor | None) -> None:
        if targets.dim() == predictions.dim() == 1:
            targets, predictions = targets.unsqueeze(1), predictions.unsqueeze(1)
        targets, predictions = same_shape(targets, predictions)
        self._require_classes(predictions)
        self.ensure_built(targets, predictions)
        if weights is not None:
            weights = broadcast_weights(weights, targets.double())
        self.sums[0].add_(self._counted(targets, predictions, weights))

    def _require_classes(self, predictions: Tensor) -> None:
        known = "classes" if self.is_unbuilt else self.sums[0].shape[-1]
        if predictions.dim() != 2 or known not in ("classes", predictions.shape[1]):
            raise SpecError(
                f"metrics: {self.name} takes predictions of shape [samples, {known}], got"
                f" {list(predictions.shape)}."
            )

    def named_results(self) -> dict[str, float]:
        numbers = self._number(self.sums[0]).reshape(-1).tolist() if self.sums else [0.0]
        if len(numbers) == 1:
            return {self.name: numbers[0]}
        return {f"{self.name}/{place}": number for place, number in enumerate(numbers)}

    @abstractmethod
    def _counted(self, targets: Tensor, predictions: Tensor, weights: Tensor | None) -> Tensor:
        """What samples add to the sums, each by its weight, of shape `[samples, 1]`."""

    @abstractmethod
    def _number(self, total: Tensor) -> Tensor:
        """The number, or one for each class, that the sums make."""


class FScore(PerClassMetric):
    """The weighted harmonic mean of precision and recall."""

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
            ValueError: An option is none that there is.
        """
        if average not in (None, "micro", "macro", "weighted"):
            raise ValueError(f"average: expected micro, macro or weighted, got {average!r}")
        if beta <= 0 or not 0 < (1.0 if threshold is None else threshold) <= 1:
            raise ValueError("expected beta above 0, and threshold above 0 and up to 1")
        super().__init__(name, device, (3,))
        self._average, self._beta, self._threshold = average, beta, threshold

    def _counted(self, targets: Tensor, predictions: Tensor, weights: Tensor | None) -> Tensor:
        if self._threshold is None:
            highest = predictions.amax(-1, keepdim=True)
            positive = (predictions >= highest) & (predictions.abs() > 1e-9)
        else:
            positive = predictions > self._threshold
        true, positive = targets.to(torch.float64), positive.to(torch.float64)
        return summed(torch.stack([positive * true, positive, true]), weights)

    def _number(self, total: Tensor) -> Tensor:
        hits, positive, true = total.sum(-1, keepdim=True) if self._average == "micro" else total
        precision, recall = hits / (positive + _SMALL), hits / (true + _SMALL)
        square = self._beta**2
        scores = precision * recall / (square * precision + recall + _SMALL) * (1 + square)
        if self._average == "weighted":
            return (scores * (true / (true.sum() + _SMALL))).sum()
        return scores if self._average is None else scores.mean()


def f1_score(
    device: torch.device,
    name: str,
    average: str | None = None,
    threshold: float | None = None,
    dtype: Any = None,
) -> FScore:
    """The harmonic mean of precision and recall."""
    return FScore(device, name, average, 1.0, threshold)


class R2Score(PerClassMetric):
    """How much of the targets' variance predictions explain."""

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
            ValueError: An option is none that there is.
        """
        known = (None, "uniform_average", "variance_weighted_average")
        if class_aggregation not in known or num_regressors < 0:
            raise ValueError(f"expected class_aggregation of {known}, num_regressors of 0 or more")
        super().__init__(name, device, (5,))
        self._aggregation, self._regressors = class_aggregation, num_regressors

    def _counted(self, targets: Tensor, predictions: Tensor, weights: Tensor | None) -> Tensor:
        true = targets.to(torch.float64)
        errors = (true - predictions).square()
        ones = torch.ones_like(errors)
        weighed = summed(torch.stack([true, true.square(), errors, ones]), weights)
        return torch.cat([weighed, ones.sum(0, keepdim=True)])

    def _number(self, total: Tensor) -> Tensor:
        sums, squares, errors, counts, samples = total
        spread = squares - sums * (sums / counts)
        scores = 1 - errors / spread
        scores = torch.where(scores.isinf(), 0.0, scores)
        if self._aggregation == "uniform_average":
            scores = scores.mean()
        elif self._aggregation is not None:
            scores = (spread * scores).sum() / spread.sum()
        return self._adjusted(scores, samples.sum())

    def _adjusted(self, scores: Tensor, samples: Tensor) -> Tensor:
        """For the number of predictors, where there are enough samples for it."""
        free = samples - 1 - self._regressors
        if not self._regressors or free <= 0:
            return scores
        return 1 - (1 - scores) * (samples - 1) / free


class ConfusionMetricPerLabel(PerClassMetric):
    """What is made of the true and false positives and negatives of each label at several thresholds."""

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
            number: From true positives, false positives, true negatives and false negatives, in this order,
                of shape `[4, thresholds, labels]`, to the number.
            name: Under which it is given.
            device: Where to count.
            thresholds: A prediction above one is positive.
            labels: How many there are; None where the first samples show it.
            scored: From predictions to what is compared to thresholds; None for themselves.
        """
        super().__init__(name, device, (4, len(thresholds)), labels)
        self._made, self._scored = number, scored
        self._thresholds = torch.tensor(thresholds, dtype=torch.float64, device=device)

    def _counted(self, targets: Tensor, predictions: Tensor, weights: Tensor | None) -> Tensor:
        scores = self._scored(predictions) if self._scored else predictions
        positive = scores > self._thresholds.to(scores.dtype)[:, None, None]
        return confusion(targets.bool(), positive, weights)

    def _number(self, total: Tensor) -> Tensor:
        return self._made(total)
