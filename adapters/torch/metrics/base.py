"""Metric interface of torch replicas, and Keras' mean metrics as torch functions, with the same results."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from isotrain.adapters.common.outputs import OutputSelector
from isotrain.adapters.torch.base import private_api
from isotrain.adapters.torch.base.tensors import overwrite
from isotrain.adapters.torch.loss.functional import Masked
from isotrain.adapters.torch.loss.shapes import broadcast_weights, same_shape
from isotrain.plugin import Component, IsotrainError, UnsupportedError, unknown_name


class Metric(ABC):
    """A metric over all samples since the last `reset`, computed from sums.

    Attributes:
        name: Name of the result.
        sums: Accumulated tensors; added over all replicas, they give the result for all samples.
        takes_weights: Whether `update` takes the targets with their sample weights, if they have some.
    """

    name: str
    sums: Sequence[Tensor]
    takes_weights = False

    @abstractmethod
    def update(self, targets: Any, predictions: Any, count: int) -> None:
        """Adds a batch of `count` samples: pytrees of tensors `[count, ...]`. Local."""

    def update_weighted(self, targets: Any, predictions: Any, weights: Any) -> None:
        """Adds a batch of samples with sample weights `[samples, ...]`. Local.

        Raises:
            UnsupportedError: The metric does not support sample weights.
        """
        raise UnsupportedError(
            f"metrics: {self.name!r} does not support sample weights; leave `weighted` out."
        )

    @abstractmethod
    def named_results(self) -> dict[str, float]:
        """Result by name; several numbers as `name/index`."""

    def named_sums(self) -> dict[str, Tensor]:
        """Sums by name, here their index, in their shapes; for checkpoints."""
        return {str(index): total for index, total in enumerate(self.sums)}

    def write_sum(self, name: str, value: Tensor) -> None:
        """Overwrites a sum.

        Raises:
            IsotrainError: No sum has that name and shape.
        """
        sums = self.named_sums()
        if name not in sums:
            raise IsotrainError(unknown_name(f"sum of the metric {self.name}", name, sums))
        overwrite(f"metrics/{self.name}/{name}", sums[name], value)

    def reset(self) -> None:
        """Sets all sums to zero."""
        for total in self.sums:
            total.zero_()

    @property
    def is_unbuilt(self) -> bool:
        """Whether the sums do not exist yet, as the first batch determines their shapes."""
        return False

    def ensure_built(self, targets: Any, predictions: Any) -> None:
        """Creates missing sums, with shapes for these targets and predictions, which are not added."""
        return

    def require_sums(self) -> None:
        """Checks that the sums exist, as those of other processes are to be added to them.

        Raises:
            UnsupportedError: They do not exist yet.
        """
        return


class OutputMetric(Metric):
    """A metric of one of several model outputs, or one with sample weights."""

    def __init__(self, metric: Metric, component: Component, outputs: OutputSelector) -> None:
        """Wraps a metric.

        Args:
            metric: Metric of the output's targets and predictions.
            component: Metric of the spec, with output and `weighted`.
            outputs: Selects an output's targets and predictions.
        """
        self.name = component.shown(metric.name)
        self.takes_weights = component.weighted or metric.takes_weights
        self._metric = metric
        self._component = component
        self._outputs = outputs

    @property
    def sums(self) -> Sequence[Tensor]:  # type: ignore[override]
        """Sums of the wrapped metric, in their shapes."""
        return self._metric.sums

    @property
    def is_unbuilt(self) -> bool:
        return self._metric.is_unbuilt

    def update(self, targets: Any, predictions: Any, count: int) -> None:
        output = self._component.output
        targets, predictions, weights = self._outputs.sample(targets, predictions, output)
        if weights is None:
            self._metric.update(targets, predictions, count)
        else:
            self._metric.update_weighted(targets, predictions, weights)

    def ensure_built(self, targets: Any, predictions: Any) -> None:
        output = self._component.output
        targets, predictions, _ = self._outputs.sample(targets, predictions, output)
        self._metric.ensure_built(targets, predictions)

    def require_sums(self) -> None:
        self._metric.require_sums()

    def named_sums(self) -> dict[str, Tensor]:
        return self._metric.named_sums()

    def write_sum(self, name: str, value: Tensor) -> None:
        self._metric.write_sum(name, value)

    def reset(self) -> None:
        self._metric.reset()

    def named_results(self) -> dict[str, float]:
        results = self._metric.named_results().items()
        return {self._component.shown(name): value for name, value in results}


def as_output_metrics(
    metrics: Sequence[Metric], components: Sequence[Component], outputs: OutputSelector
) -> list[Metric]:
    """Metrics, wrapped in `OutputMetric` where the spec sets an output or `weighted`."""
    return [
        OutputMetric(metric, component, outputs)
        if component.weighted or component.output is not None
        else metric
        for metric, component in zip(metrics, components, strict=True)
    ]


class MeanMetric(Metric):
    """Mean over the samples of a function's values, one or more per sample."""

    def __init__(
        self, function: Callable[[Any, Any], Any], name: str, device: torch.device
    ) -> None:
        self.name = name
        self._function = function
        self._total = torch.zeros(2, dtype=torch.float64, device=device)
        self.sums = [self._total]

    def update(self, targets: Any, predictions: Any, count: int) -> None:
        self._total[0] += self._values(targets, predictions).mean(dtype=torch.float64) * count
        self._total[1] += count

    def update_weighted(self, targets: Any, predictions: Any, weights: Any) -> None:
        values = self._function(targets, predictions)
        if isinstance(values, Masked):
            values, weights = values.values, values.mask * broadcast_weights(weights, values.values)
        if not values.dim():
            super().update_weighted(targets, predictions, weights)
        values = values.flatten(weights.dim()).mean(-1) if values.dim() > weights.dim() else values
        self._total[0] += (values * weights).sum(dtype=torch.float64)
        self._total[1] += weights.expand_as(values).sum(dtype=torch.float64)

    def _values(self, targets: Any, predictions: Any) -> Tensor:
        """Values of the samples, shape `[samples, ...]`, or their mean, a scalar."""
        result = self._function(targets, predictions)
        values: Tensor = result.values if isinstance(result, Masked) else result
        return values

    def named_results(self) -> dict[str, float]:
        total, count = self._total.tolist()
        return {self.name: self._result(total / count if count else 0.0)}

    def _result(self, mean: float) -> float:
        return mean


class RootMeanMetric(MeanMetric):
    """Square root of a mean."""

    def _result(self, mean: float) -> float:
        return math.sqrt(mean)


def as_columns(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps a function so that 1-D targets and predictions, one number per sample, become `[samples, 1]`."""

    def call(targets: Tensor, predictions: Tensor, **options: Any) -> Any:
        if targets.dim() == predictions.dim() == 1:
            targets, predictions = targets.unsqueeze(1), predictions.unsqueeze(1)
        return function(targets, predictions, **options)

    return call


# Metric functions: targets and predictions are [samples, ...], values [samples, ...] of float64


def _matches(targets: Tensor, predictions: Tensor) -> Tensor:
    """1.0 where targets and predictions of one shape are equal, else 0.0: float64."""
    return torch.eq(*same_shape(targets, predictions)).to(torch.float64)


def accuracy(targets: Tensor, predictions: Tensor) -> Tensor:
    """Whether targets and predictions are equal: 0.0 or 1.0, float64, in their shape."""
    targets, predictions = same_shape(targets, predictions)
    return _matches(targets.to(predictions.dtype), predictions)


def binary_accuracy(targets: Tensor, predictions: Tensor, threshold: float = 0.5) -> Tensor:
    """Whether predictions above the threshold match targets 0 and 1: 0.0 or 1.0, float64, in their shape."""
    targets, predictions = same_shape(targets, predictions)
    return _matches(targets, (predictions > threshold).to(targets.dtype))


def categorical_accuracy(targets: Tensor, predictions: Tensor) -> Tensor:
    """Whether the highest prediction has the one-hot target: float64, `[..., classes]` to `[...]`."""
    targets, predictions = same_shape(targets, predictions)
    return _matches(targets.argmax(-1), predictions.argmax(-1))


def sparse_categorical_accuracy(targets: Tensor, predictions: Tensor) -> Tensor:
    """Whether the highest prediction of `[..., classes]` is the target class of `[...]`: float64, `[...]`."""
    return _matches(_classes(targets, predictions), predictions.argmax(-1))


def _classes(targets: Tensor, predictions: Tensor) -> Tensor:
    """Sparse targets without a last axis of length 1; predictions have shape `[..., classes]`."""
    has_column = targets.dim() == predictions.dim() and targets.shape[-1] == 1
    return targets.squeeze(-1) if has_column else targets


def top_k_categorical_accuracy(targets: Tensor, predictions: Tensor, k: int = 5) -> Tensor:
    """Whether the one-hot target is among the k highest predictions: `[..., classes]` to `[...]`, float64."""
    targets, predictions = same_shape(targets, predictions)
    return sparse_top_k_categorical_accuracy(targets.argmax(-1), predictions, k)


def sparse_top_k_categorical_accuracy(
    targets: Tensor, predictions: Tensor, k: int = 5, from_sorted_ids: bool = False
) -> Tensor:
    """Whether the class `[...]` is among the k highest of `[..., classes]`: 0.0 or 1.0, float64, `[...]`."""
    classes = _classes(targets, predictions).unsqueeze(-1)
    if from_sorted_ids:
        return (classes == predictions[..., :k]).any(-1).to(torch.float64)
    is_class = (classes >= 0) & (classes < predictions.shape[-1])  # another target counts as wrong
    target_scores = predictions.gather(-1, torch.where(is_class, classes, 0).long())
    is_among = (predictions > target_scores).sum(-1) < k
    return (is_among & is_class.squeeze(-1)).to(torch.float64)


def inferred_accuracy(targets: Tensor, predictions: Tensor) -> Tensor:
    """Accuracy whose kind (binary, categorical, sparse categorical) follows from the shapes."""
    if predictions.dim() == 1:
        targets, predictions = targets.reshape(-1, 1), predictions.unsqueeze(1)
    if predictions.shape[-1] == 1:
        return binary_accuracy(targets, predictions)
    is_sparse = targets.dim() < predictions.dim() or targets.shape[-1] == 1
    function = sparse_categorical_accuracy if is_sparse else categorical_accuracy
    return function(targets, predictions)


def squared_error(targets: Tensor, predictions: Tensor) -> Tensor:
    """Squared differences, in the shape of targets and predictions."""
    targets, predictions = same_shape(targets, predictions)
    return (targets.to(predictions.dtype) - predictions).square()


def pearson_correlation(targets: Tensor, predictions: Tensor, axis: int = -1) -> Tensor:
    """Pearson correlation along an axis: shape without that axis."""
    targets, predictions = same_shape(targets, predictions)
    deviations = [tensor - tensor.mean(axis, keepdim=True) for tensor in (targets, predictions)]
    a, b = (d / d.std(axis, correction=0, keepdim=True) for d in deviations)
    return (a * b).mean(axis)


def concordance_correlation(targets: Tensor, predictions: Tensor, axis: int = -1) -> Tensor:
    """Concordance correlation (Lin 1989) along an axis: shape without that axis.

    As in Keras, the covariance subtracts the predictions' mean from both.
    """
    targets, predictions = same_shape(targets, predictions)
    target_mean = targets.mean(axis, keepdim=True)
    prediction_mean = predictions.mean(axis, keepdim=True)
    variances = targets.var(axis, correction=0, keepdim=True) + predictions.var(
        axis, correction=0, keepdim=True
    )
    covariance = (targets - prediction_mean) * (predictions - prediction_mean)
    return (2 * covariance / (variances + (target_mean - prediction_mean).square() + 1e-7)).mean(
        axis
    )


class MeasuredPredictions(NamedTuple):
    """Predictions of a captured graph, with the increments of the metrics that are part of it.

    Attributes:
        predictions: Predictions for a slice, a pytree of tensors.
        sums: For each captured metric, what the samples add to its sums, in their shapes.
        metric_indices: Indices of the captured metrics among all metrics.
    """

    predictions: Any
    sums: list[list[Tensor]]
    metric_indices: tuple[int, ...]

    def add_to(self, metrics: Sequence[Metric]) -> None:
        """Adds the increments to the captured metrics."""
        totals = [total for index in self.metric_indices for total in metrics[index].sums]
        private_api.foreach_add_(totals, [increment for sums in self.sums for increment in sums])

    def others(self, metrics: Sequence[Metric]) -> list[Metric]:
        """Metrics that are not part of the captured graph."""
        return [metric for index, metric in enumerate(metrics) if index not in self.metric_indices]


def collect(metrics: Iterable[Metric], total: Callable[[Tensor], Tensor]) -> dict[str, float]:
    """Results over all replicas, from sums of any shapes; resets the metrics. Collective.

    Args:
        metrics: Metrics of this replica; the same ones, in the same order, on every rank.
        total: All-reduce (sum) of a tensor over all replicas.
    """
    results: dict[str, float] = {}
    for metric in metrics:
        for local_sum in metric.sums:
            local_sum.copy_(total(local_sum))
        results |= metric.named_results()
        metric.reset()
    return results


class LazyMetric(Metric):
    """A metric that creates its sums at the first batch; sums written before (on a resume) are kept."""

    def __init__(self) -> None:
        self._pending: dict[str, Tensor] = {}

    @property
    @abstractmethod
    def is_unbuilt(self) -> bool: ...

    def named_sums(self) -> dict[str, Tensor]:
        return self._pending or super().named_sums()

    def write_sum(self, name: str, value: Tensor) -> None:
        """Overwrites a sum by a value of its shape, or keeps the value until the sums exist."""
        if self.is_unbuilt:
            self._pending[name] = value
        else:
            super().write_sum(name, value)

    def write_pending(self) -> None:
        """Writes the kept values, once the sums exist."""
        pending, self._pending = self._pending, {}
        for name, value in pending.items():
            super().write_sum(name, value)

    def reset(self) -> None:
        self._pending = {}
        super().reset()
