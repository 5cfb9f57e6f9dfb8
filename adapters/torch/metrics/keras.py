"""Adapter from Keras metrics to the metric interface of torch replicas.

Imported only after `keras_backend.set_backend`.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import keras
import torch

from isotrain.adapters.keras import metrics as keras_metrics
from isotrain.adapters.torch.base.no_grad import WithoutGradients
from isotrain.adapters.torch.metrics.base import LazyMetric


class KerasMetric(LazyMetric):
    """A Keras metric; its variables are the sums."""

    def __init__(self, metric: keras.metrics.Metric) -> None:
        super().__init__()
        self.name = metric.name
        self.takes_weights = isinstance(metric, keras_metrics.OutputLossMetric)
        self._metric = metric
        self._without_gradients = WithoutGradients(lambda: self.sums)

    @property
    def sums(self) -> Sequence[torch.Tensor]:  # type: ignore[override]
        """Tensors of its variables, any shape; some metrics create them at the first batch."""
        return [variable.value.detach() for variable in self._metric.variables]

    def named_sums(self) -> dict[str, torch.Tensor]:
        names = keras_metrics.sum_names(self._metric)
        return self._pending or dict(zip(names, self.sums, strict=True))

    @property
    def is_unbuilt(self) -> bool:
        return bool(keras_metrics.unbuilt_metrics([self._metric]))

    def ensure_built(self, targets: Any, predictions: Any) -> None:
        build = functools.partial(keras_metrics.ensure_built, [self._metric])
        self._without_gradients(build, targets, predictions)
        self.write_pending()

    def update(self, targets: Any, predictions: Any, count: int) -> None:
        self._update(targets, predictions)

    def update_weighted(self, targets: Any, predictions: Any, weights: Any) -> None:
        self._update(targets, predictions, weights)

    def _update(self, targets: Any, predictions: Any, weights: Any | None = None) -> None:
        """Updates the metric, with gradients if it computes some itself; its sums keep none."""
        if self._pending:
            self.ensure_built(targets, predictions)
        update = functools.partial(keras_metrics.update_metric, self._metric)
        self._without_gradients(update, targets, predictions, weights)

    def named_results(self) -> dict[str, float]:
        return keras_metrics.named_results(self.name, self._metric.result())

    def reset(self) -> None:
        self._pending = {}
        self._metric.reset_state()

    def require_sums(self) -> None:
        keras_metrics.require_sums([self._metric])
