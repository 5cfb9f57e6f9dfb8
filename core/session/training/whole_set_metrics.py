"""Metrics of all predictions of a validation set at once, such as the area under a ROC curve."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from isotrain.core.contracts.backend.replica_group import ReplicaGroup
from isotrain.core.data.batch import Batch
from isotrain.core.data.pytree import leaves, unweighted
from isotrain.core.errors import DataError, SpecError
from isotrain.core.session.training.predictions import concatenated, gathered, predict_batch
from isotrain.core.spec import import_strings


class WholeSetMetrics:
    """The spec's `metrics_over_all` on one data set. Every process has all predictions and targets.

    A metric is a function of targets and predictions; or a class, or an object of one, with the methods of
    Keras' metrics (`reset_state`) or of torchmetrics (`reset`, called with predictions first).
    """

    def __init__(self, metrics: Mapping[str, Any], group: ReplicaGroup) -> None:
        """Starts without samples.

        Args:
            metrics: References of the metrics, by name.
            group: The replica group that predicts.
        """
        self._metrics = {name: _made(reference) for name, reference in metrics.items()}
        self._group = group
        self._targets: list[Any] = []
        self._predictions: list[Any] = []

    def add(self, batch: Batch) -> None:
        """Predicts for a batch, and keeps predictions and targets of all replicas. Collective."""
        if self._metrics:
            targets = [unweighted(slices[0].targets)[0] for slices in batch.slices]
            self._targets.append(gathered(self._group, batch, targets))
            _require_same_widths([self._targets[0], self._targets[-1], *targets])
            self._predictions.append(predict_batch(self._group, batch))

    def results(self) -> dict[str, float]:
        """Computes the metrics: a number by name, several as `NAME/0` or `NAME/KEY`. Local.

        Raises:
            SpecError: A metric returned no numbers.
        """
        if not self._metrics:
            return {}
        targets, predictions = concatenated(self._targets), concatenated(self._predictions)
        return {
            full_name: number
            for name, metric in self._metrics.items()
            for full_name, number in self._numbers(name, self._value(metric, targets, predictions))
        }

    def _value(self, metric: Any, targets: Any, predictions: Any) -> Any:
        if hasattr(metric, "reset_state"):  # Keras
            metric.reset_state()
        elif hasattr(metric, "reset"):  # torchmetrics
            metric.reset()
            predictions, targets = self._group.tensor(predictions), self._group.tensor(targets)
            if hasattr(metric, "to"):
                metric = metric.to(predictions.device)
            return metric(predictions, targets)
        return metric(targets, predictions)

    def _numbers(self, name: str, value: Any) -> Iterator[tuple[str, float]]:
        """The numbers that a metric returned, each with its name; a tensor may be on any device."""
        if isinstance(value, Mapping):
            for key, part in value.items():
                yield from self._numbers(f"{name}/{key}", part)
            return
        array = self._group.numpy(value) if hasattr(value, "numpy") else np.asarray(value)
        if array.dtype.kind not in "biuf":
            raise SpecError(
                f"metrics_over_all: {name!r}: expected a number, an array or a dict of numbers, received"
                f" {type(value).__name__}."
            )
        for index, number in np.ndenumerate(array):
            yield "/".join([name, *map(str, index)]), float(number)


def _require_same_widths(targets: Sequence[Any]) -> None:
    """Refuses targets of several widths: in all of them together, padding would look like a target.

    Raises:
        DataError: Their shapes differ in more than the first axis.
    """
    shapes = [[tuple(part.shape[1:]) for _, part in leaves(tree, "")] for tree in targets]
    if any(each != shapes[0] for each in shapes):
        raise DataError(
            f"metrics_over_all: the targets have rows of several shapes, {shapes[0]} first, and such a metric"
            " gets them all in one array. Pad all to one length: `collate: {pad: ..., to: 512}`."
        )


def _made(reference: Any) -> Any:
    metric = import_strings.resolve(reference)
    return metric() if isinstance(metric, type) else metric
