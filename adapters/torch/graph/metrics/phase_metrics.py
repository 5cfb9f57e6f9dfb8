"""The metrics of a portable model: which of them a record adds up, and which are left to Keras.

Imported only after `keras_backend.set_backend`.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any, Self

import torch

from isotrain.adapters.common import resolve as choices
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
    """The metrics of a portable model in training or in evaluation.

    Attributes:
        metrics: As a group adds them up.
        excluded: Why some are no part of records, by name.
    """

    def __init__(self, metrics: Sequence[Metric] = (), each: Sequence[CapturedMetric] = ()) -> None:
        """Leaves none out.

        Args:
            metrics: As a group adds them up.
            each: The same as a record adds to them.
        """
        self.metrics = list(metrics)
        self.excluded: dict[str, str] = {}
        self._each = each

    @classmethod
    def of(cls, spec: TrainingSpec, outputs: OutputSelector, losses: Losses) -> Self:
        """Makes them anew.

        Args:
            spec: Names them.
            outputs: Of the model.
            losses: That the steps compute, by output.
        """
        found, given = keras_losses.build_metrics_and_losses(spec, "torch", losses)
        metrics = as_output_metrics([KerasMetric(metric) for metric in found], given, outputs)
        functions = itertools.chain(map(_own_functions, spec.metrics), itertools.repeat([]))
        each = [
            CapturedMetric(shown.name, metric, chosen, outputs, own)
            for shown, metric, chosen, own in zip(metrics, found, given, functions, strict=False)
        ]
        return cls(metrics, each)

    @property
    def captured(self) -> dict[int, CapturedMetric]:
        """Those that are part of records, by their places."""
        return {i: each for i, each in enumerate(self._each) if each.name not in self.excluded}

    @property
    def names(self) -> list[str]:
        """Of all of them."""
        return [each.name for each in self._each]

    @property
    def callables(self) -> list[Any]:
        """What has attributes by which those compute that are part of records."""
        return [called for each in self.captured.values() for called in each.callables]

    def added(self, targets: Any, predictions: Any) -> MeasuredPredictions:
        """What samples add to the sums of those that are part of records; nothing moves."""
        captured = self.captured
        sums = [each.added(targets, predictions) for each in captured.values()]
        return MeasuredPredictions(predictions, sums, tuple(captured))

    def differing(self, targets: Any, found: MeasuredPredictions, exact: bool) -> list[str]:
        """The names of those to which Keras adds something else."""
        pairs = zip(found.places, found.sums, strict=True)
        return [
            self._each[place].name
            for place, added in pairs
            if not self._each[place].would_add(targets, found.predictions, added, exact)
        ]

    def ensure_built(self, targets: Any, predictions: Any) -> None:
        """Has metrics make sums that they lack, of a placeholder."""
        for metric in self.metrics:
            if metric.is_unbuilt:
                metric.ensure_built(targets, predictions)

    @property
    def are_unbuilt(self) -> bool:
        """Whether one has yet to make its sums, of samples."""
        return any(metric.is_unbuilt for metric in self.metrics)

    def remember(self) -> None:
        """Remembers what the attributes of those are and hold that are part of records."""
        for each in self.captured.values():
            each.remember()

    @property
    def are_unchanged(self) -> bool:
        """Whether none of these has changed since."""
        return all(each.is_unchanged for each in self.captured.values())

    def exclude_changed(self) -> None:
        """Leaves out those that have."""
        for each in self.captured.values():
            if not each.is_unchanged:
                self.excluded[each.name] = f"an attribute changes between steps: {each.change()}"

    def exclude_uncapturable(self, targets: Any, predictions: Any, why: str) -> None:
        """Leaves out those that cannot be recorded.

        Args:
            targets: Of a slice.
            predictions: Of the same.
            why: They cannot be recorded together, for all where each can by itself.
        """
        reasons = {
            each.name: reason
            for each in self.captured.values()
            if (reason := _refusal(each, targets, predictions)) is not None
        }
        self.excluded |= reasons or dict.fromkeys((e.name for e in self.captured.values()), why)


def _refusal(metric: CapturedMetric, targets: Any, predictions: Any) -> str | None:
    """Why a metric by itself cannot be recorded; None where it can."""

    def alone(given: Any, expected: Any) -> tuple[Any, Any]:
        return torch.zeros(()), metric.added(expected, given)

    try:
        capture(alone, PythonState(None, metric.callables), (), predictions, targets)
    except UncapturableError as error:
        return str(error)
    return None


def _own_functions(given: Component | Mapping[str, Component]) -> list[Any]:
    """A person's function or object that a metric of the spec is."""
    chosen: Component = choices.resolve_for_framework(given, "torch", "metrics")
    own = import_strings.resolve(chosen.name) if chosen.is_reference else None
    return [] if own is None or isinstance(own, type) else [own]
