"""The metrics of native models, in torch's own functions: the same numbers as Keras' of that name."""

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
from isotrain.adapters.torch.loss.functional import Masked, broadcast_weights, same_shape
from isotrain.plugin import Component, IsotrainError, UnsupportedError, unknown_name


class Metric(ABC):
    """A number of all samples since the last `reset`.

    Attributes:
        name: Under which the number is given.
        sums: What the samples add to: their sums over the replicas make the number of all samples.
        takes_weights: Whether `update` gets the targets with their sample weights, where they have some.
    """

    name: str
    sums: Sequence[Tensor]
    takes_weights = False

    @abstractmethod
    def update(self, targets: Any, predictions: Any, count: int) -> None:
        """Adds so many samples."""

    def update_weighted(self, targets: Any, predictions: Any, weights: Any) -> None:
        """Adds samples, each of which counts by its weight.

        Raises:
            UnsupportedError: It cannot.
        """
        raise UnsupportedError(
            f"metrics: {self.name!r} does not count by sample weights; leave `weighted` out."
        )

    @abstractmethod
    def named_results(self) -> dict[str, float]:
        """The number by its name, or several as `name/place`."""

    def named_sums(self) -> dict[str, Tensor]:
        """The sums by a name for each."""
        return {str(place): total for place, total in enumerate(self.sums)}

    def write_sum(self, name: str, value: Tensor) -> None:
        """Sets one of them.

        Raises:
            IsotrainError: There is none of that name and shape.
        """
        known = self.named_sums()
        if name not in known:
            raise IsotrainError(unknown_name(f"sum of the metric {self.name}", name, known))
        overwrite(f"metrics/{self.name}/{name}", known[name], value)

    def reset(self) -> None:
        """Forgets all samples."""
        for total in self.sums:
            total.zero_()

    @property
    def is_unbuilt(self) -> bool:
        """Whether it makes its sums only when it sees the first samples."""
        return False

    def ensure_built(self, targets: Any, predictions: Any) -> None:
        """Has it make its sums, if it is late, from a placeholder, which does not count."""
        return

    def require_sums(self) -> None:
        """Makes sure that it is not late, for sums of other processes are added to it.

        Raises:
            UnsupportedError: It is.
        """
        return


class OutputMetric(Metric):
    """A metric of one of several outputs, or one in which sample weights count."""

    def __init__(self, metric: Metric, chosen: Component, outputs: OutputSelector) -> None:
        """Measures what the spec says.

        Args:
            metric: Of targets and predictions of that output.
            chosen: What the spec says of it.
            outputs: How outputs are told apart.
        """
        self.name = chosen.shown(metric.name)
        self.takes_weights = chosen.weighted or metric.takes_weights
        self._metric = metric
        self._chosen = chosen
        self._outputs = outputs

    @property
    def sums(self) -> Sequence[Tensor]:  # type: ignore[override]
        return self._metric.sums

    @property
    def is_unbuilt(self) -> bool:
        return self._metric.is_unbuilt

    def update(self, targets: Any, predictions: Any, count: int) -> None:
        own, beside, weights = self._outputs.sample(targets, predictions, self._chosen.output)
        if weights is None:
            self._metric.update(own, beside, count)
        else:
            self._metric.update_weighted(own, beside, weights)

    def ensure_built(self, targets: Any, predictions: Any) -> None:
        own, beside, _ = self._outputs.sample(targets, predictions, self._chosen.output)
        self._metric.ensure_built(own, beside)

    def require_sums(self) -> None:
        self._metric.require_sums()

    def named_sums(self) -> dict[str, Tensor]:
        return self._metric.named_sums()

    def write_sum(self, name: str, value: Tensor) -> None:
        self._metric.write_sum(name, value)

    def reset(self) -> None:
        self._metric.reset()

    def named_results(self) -> dict[str, float]:
        found = self._metric.named_results().items()
        return {self._chosen.shown(name): value for name, value in found}


def as_output_metrics(
    metrics: Sequence[Metric], given: Sequence[Component], outputs: OutputSelector
) -> list[Metric]:
    """Metrics, each of the output, and with the weights, that the spec says."""
    return [
        OutputMetric(metric, chosen, outputs)
        if chosen.weighted or chosen.output is not None
        else metric
        for metric, chosen in zip(metrics, given, strict=True)
    ]


class MeanMetric(Metric):
    """The mean over the samples of what a function gives for each."""

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
        given = self._function(targets, predictions)
        if isinstance(given, Masked):
            given, weights = given.values, given.mask * broadcast_weights(weights, given.values)
        if not given.dim():
            super().update_weighted(targets, predictions, weights)
        values = given.flatten(weights.dim()).mean(-1) if given.dim() > weights.dim() else given
        self._total[0] += (values * weights).sum(dtype=torch.float64)
        self._total[1] += weights.expand_as(values).sum(dtype=torch.float64)

    def _values(self, targets: Any, predictions: Any) -> Tensor:
        given = self._function(targets, predictions)
        values: Tensor = given.values if isinstance(given, Masked) else given
        return values

    def named_results(self) -> dict[str, float]:
        total, count = self._total.tolist()
        return {self.name: self._number(total / count if count else 0.0)}

    def _number(self, mean: float) -> float:
        return mean


class RootMeanMetric(MeanMetric):
    """The square root of such a mean."""

    def _number(self, mean: float) -> float:
        return math.sqrt(mean)


def as_columns(function: Callable[..., Any]) -> Callable[..., Any]:
    """Has a function take one number per sample as a column: a row would be one sample to it."""

    def call(targets: Tensor, predictions: Tensor, **options: Any) -> Any:
        if targets.dim() == predictions.dim() == 1:
            targets, predictions = targets.unsqueeze(1), predictions.unsqueeze(1)
        return function(targets, predictions, **options)

    return call


def _matches(targets: Tensor, predictions: Tensor) -> Tensor:
    return torch.eq(*same_shape(targets, predictions)).to(torch.float64)


def accuracy(targets: Tensor, predictions: Tensor) -> Tensor:
    targets, predictions = same_shape(targets, predictions)
    return _matches(targets.to(predictions.dtype), predictions)


def binary_accuracy(targets: Tensor, predictions: Tensor, threshold: float = 0.5) -> Tensor:
    targets, predictions = same_shape(targets, predictions)
    return _matches(targets, (predictions > threshold).to(targets.dtype))


def categorical_accuracy(targets: Tensor, predictions: Tensor) -> Tensor:
    targets, predictions = same_shape(targets, predictions)
    return _matches(targets.argmax(-1), predictions.argmax(-1))


def sparse_categorical_accuracy(targets: Tensor, predictions: Tensor) -> Tensor:
    return _matches(_classes(targets, predictions), predictions.argmax(-1))


def _classes(targets: Tensor, predictions: Tensor) -> Tensor:
    column = targets.dim() == predictions.dim() and targets.shape[-1] == 1
    return targets.squeeze(-1) if column else targets


def top_k_categorical_accuracy(targets: Tensor, predictions: Tensor, k: int = 5) -> Tensor:
    targets, predictions = same_shape(targets, predictions)
    return sparse_top_k_categorical_accuracy(targets.argmax(-1), predictions, k)


def sparse_top_k_categorical_accuracy(
    targets: Tensor, predictions: Tensor, k: int = 5, from_sorted_ids: bool = False
) -> Tensor:
    classes = _classes(targets, predictions).unsqueeze(-1)
    if from_sorted_ids:
        return (classes == predictions[..., :k]).any(-1).to(torch.float64)
    own = predictions.gather(-1, classes.long())
    return ((predictions > own).sum(-1) < k).to(torch.float64)


def inferred_accuracy(targets: Tensor, predictions: Tensor) -> Tensor:
    """Accuracy whose kind (binary, categorical, sparse categorical) follows from the shapes."""
    if predictions.dim() == 1:
        targets, predictions = targets.reshape(-1, 1), predictions.unsqueeze(1)
    if predictions.shape[-1] == 1:
        return binary_accuracy(targets, predictions)
    sparse = targets.dim() < predictions.dim() or targets.shape[-1] == 1
    kind = sparse_categorical_accuracy if sparse else categorical_accuracy
    return kind(targets, predictions)


def squared_error(targets: Tensor, predictions: Tensor) -> Tensor:
    targets, predictions = same_shape(targets, predictions)
    return (targets.to(predictions.dtype) - predictions).square()


def pearson_correlation(targets: Tensor, predictions: Tensor, axis: int = -1) -> Tensor:
    targets, predictions = same_shape(targets, predictions)
    deviations = [tensor - tensor.mean(axis, keepdim=True) for tensor in (targets, predictions)]
    one, other = (d / d.std(axis, correction=0, keepdim=True) for d in deviations)
    return (one * other).mean(axis)


def concordance_correlation(targets: Tensor, predictions: Tensor, axis: int = -1) -> Tensor:
    """As Keras has it: the covariance takes the predictions' mean from both."""
    targets, predictions = same_shape(targets, predictions)
    own, other = targets.mean(axis, keepdim=True), predictions.mean(axis, keepdim=True)
    variances = targets.var(axis, correction=0, keepdim=True) + predictions.var(
        axis, correction=0, keepdim=True
    )
    covariance = (targets - other) * (predictions - other)
    return (2 * covariance / (variances + (own - other).square() + 1e-7)).mean(axis)


class MeasuredPredictions(NamedTuple):
    """Predictions of a captured graph, with the increments of the metrics that are part of it.

    Attributes:
        predictions: Predictions for a slice, a pytree of tensors.
        sums: For each captured metric, what the samples add to its sums, in their shapes.
        indices: Indices of the captured metrics among all metrics.
    """

    predictions: Any
    sums: list[list[Tensor]]
    indices: tuple[int, ...]

    def add_to(self, metrics: Sequence[Metric]) -> None:
        """Adds the increments to the captured metrics."""
        totals = [total for index in self.indices for total in metrics[index].sums]
        private_api.foreach_add_(totals, [increment for sums in self.sums for increment in sums])

    def others(self, metrics: Sequence[Metric]) -> list[Metric]:
        """Metrics that are not part of the captured graph."""
        return [metric for index, metric in enumerate(metrics) if index not in self.indices]


def collect(metrics: Iterable[Metric], total: Callable[[Tensor], Tensor]) -> dict[str, float]:
    """The numbers of all replicas; the metrics start anew.

    Args:
        metrics: Of this replica.
        total: Sums a tensor over all replicas.
    """
    results: dict[str, float] = {}
    for metric in metrics:
        for own in metric.sums:
            own.copy_(total(own))
        results |= metric.named_results()
        metric.reset()
    return results


class LazyMetric(Metric):
    """Keeps what is written of its sums until they are made."""

    def __init__(self) -> None:
        self._pending: dict[str, Tensor] = {}

    @property
    @abstractmethod
    def is_unbuilt(self) -> bool: ...

    def named_sums(self) -> dict[str, Tensor]:
        return self._pending or super().named_sums()

    def write_sum(self, name: str, value: Tensor) -> None:
        """Sets one of them; it is kept until it is made, if that is yet to come."""
        if self.is_unbuilt:
            self._pending[name] = value
        else:
            super().write_sum(name, value)

    def write_pending(self) -> None:
        """Sets what was kept, once the sums are made."""
        pending, self._pending = self._pending, {}
        for name, value in pending.items():
            super().write_sum(name, value)

    def reset(self) -> None:
        self._pending = {}
        super().reset()
