"""Metrics of a portable model in one phase: those in captured graphs, and those left to Keras.

Imported only after `keras_backend.set_backend`.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any, Self

import torch

from isotrain.adapters.common import spec_components as choices
from isotrain.adapters.common.outputs import OutputSelector
from isotrain.adapters.keras import losses as keras_losses
from isotrain.adapters.keras.losses import Losses
from isotrain.adapters.torch.graph.guards.python_state import PythonState
from isotrain.adapters.torch.graph.metrics.one_metric import CapturedMetric
from isotrain.adapters.torch.graph.trace import capture
from isotrain.adapters.torch.graph.traceability import UncapturableError
from isotrain.adapters.torch.metrics.base import MeasuredPredictions, Metric, as_output_metrics
from isotrain.adapters.torch.metrics.keras import KerasMetric
from isotrain.plugin import Component, TrainingSpec, import_strings


class CapturedMetrics:
    """Metrics of a portable model in training or in evaluation.

    Attributes:
        metrics: Metrics as the replica group sums them up.
        excluded: Reasons that metrics are not part of captured graphs, by name.
    """

    def __init__(
        self, metrics: Sequence[Metric] = (), capturable: Sequence[CapturedMetric] = ()
    ) -> None:
        """Excludes none.

        Args:
            metrics: Metrics as the replica group sums them up.
            capturable: Captured form of these metrics, in the same order.
        """
        self.metrics = list(metrics)
        self.excluded: dict[str, str] = {}
        self._capturable = capturable

    @classmethod
    def of(cls, spec: TrainingSpec, outputs: OutputSelector, losses: Losses) -> Self:
        """Creates the metrics of a spec.

        Args:
            spec: Training spec with the metrics.
            outputs: Selects the model output that a metric measures.
            losses: Losses that the steps compute, by output.
        """
        keras_metrics, components = keras_losses.build_metrics_and_losses(spec, "torch", losses)
        wrapped = [KerasMetric(metric) for metric in keras_metrics]
        metrics = as_output_metrics(wrapped, components, outputs)
        functions = itertools.chain(map(_custom_functions, spec.metrics), itertools.repeat([]))
        rows = zip(metrics, keras_metrics, components, functions, strict=False)
        capturable = [
            CapturedMetric(shown.name, metric, component, outputs, custom)
            for shown, metric, component, custom in rows
        ]
        return cls(metrics, capturable)

    @property
    def captured(self) -> dict[int, CapturedMetric]:
        """Metrics that are part of captured graphs, by index."""
        return {
            i: each for i, each in enumerate(self._capturable) if each.name not in self.excluded
        }

    @property
    def names(self) -> list[str]:
        """Names of all metrics."""
        return [each.name for each in self._capturable]

    @property
    def callables(self) -> list[Any]:
        """Callables of the captured metrics, whose attributes are guarded."""
        return [function for each in self.captured.values() for function in each.callables]

    def increments(self, targets: Any, predictions: Any) -> MeasuredPredictions:
        """Increments of the captured metrics by a batch; the metrics stay unchanged."""
        captured = self.captured
        sums = [each.increments(targets, predictions) for each in captured.values()]
        return MeasuredPredictions(predictions, sums, tuple(captured))

    def mismatched(self, targets: Any, measured: MeasuredPredictions, exact: bool) -> list[str]:
        """Names of the metrics whose captured increments differ from Keras' update."""
        pairs = zip(measured.metric_indices, measured.sums, strict=True)
        return [
            self._capturable[index].name
            for index, sums in pairs
            if not self._capturable[index].matches_keras(targets, measured.predictions, sums, exact)
        ]

    def ensure_built(self, targets: Any, predictions: Any) -> None:
        """Builds the metrics that have no variables yet."""
        for metric in self.metrics:
            if metric.is_unbuilt:
                metric.ensure_built(targets, predictions)

    @property
    def are_unbuilt(self) -> bool:
        """Whether a metric has no variables yet."""
        return any(metric.is_unbuilt for metric in self.metrics)

    def save_state(self) -> None:
        """Saves the attributes of the captured metrics and their contents."""
        for each in self.captured.values():
            each.save_state()

    @property
    def are_unchanged(self) -> bool:
        """Whether the attributes of all captured metrics are as `save_state` saved them."""
        return all(each.is_unchanged for each in self.captured.values())

    def exclude_changed(self) -> None:
        """Excludes the metrics whose attributes have changed."""
        for each in self.captured.values():
            if not each.is_unchanged:
                self.excluded[each.name] = (
                    f"an attribute changes between steps: {each.describe_change()}"
                )

    def exclude_uncapturable(self, targets: Any, predictions: Any, why: str) -> None:
        """Excludes the metrics that cannot be captured; all of them if each can by itself.

        Args:
            targets: Targets of a slice, a pytree of tensors.
            predictions: Predictions for it, a pytree of tensors.
            why: Reason that they cannot be captured together.
        """
        reasons = {
            each.name: reason
            for each in self.captured.values()
            if (reason := _uncapturable_reason(each, targets, predictions)) is not None
        }
        self.excluded |= reasons or dict.fromkeys((e.name for e in self.captured.values()), why)


def _uncapturable_reason(metric: CapturedMetric, targets: Any, predictions: Any) -> str | None:
    """Reason that a metric by itself cannot be captured; None if it can."""

    def compute(predicted: Any, expected: Any) -> tuple[Any, Any]:
        return torch.zeros(()), metric.increments(expected, predicted)

    try:
        capture(compute, PythonState(None, metric.callables), (), predictions, targets)
    except UncapturableError as error:
        return str(error)
    return None


def _custom_functions(declared: Component | Mapping[str, Component]) -> list[Any]:
    """Custom function or object (not a class) that a metric of the spec refers to; at most one."""
    component: Component = choices.resolve_for_framework(declared, "torch", "metrics")
    custom = import_strings.resolve(component.name) if component.is_reference else None
    return [] if custom is None or isinstance(custom, type) else [custom]
