"""One metric of a portable model in a captured graph: its increments, and guards on its attributes.

Imported only after `keras_backend.set_backend`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
import torch

from isotrain.adapters.common.outputs import OutputSelector
from isotrain.adapters.keras import metrics as keras_metrics
from isotrain.adapters.torch.graph.guards.python_state import PythonState
from isotrain.adapters.torch.graph.verify import agree
from isotrain.plugin import Component


class CapturedMetric:
    """A Keras metric whose increments (what a slice adds to its variables) are part of a captured graph.

    Attributes:
        name: Name in results.
        callables: The metric and functions that it calls, whose attributes are guarded.
    """

    def __init__(
        self,
        name: str,
        metric: keras.metrics.Metric,
        component: Component,
        outputs: OutputSelector,
        functions: Sequence[Any],
    ) -> None:
        """Wraps a metric.

        Args:
            name: Name in results.
            metric: Keras metric.
            component: Name and options of the metric in the spec.
            outputs: Selects the model output that it measures.
            functions: Custom functions and objects that it calls.
        """
        self.name = name
        self.callables = [metric, *functions]
        self._metric = metric
        self._component = component
        self._outputs = outputs
        self._state: PythonState | None = None

    def save_state(self) -> None:
        """Saves its attributes and their contents."""
        self._state = PythonState(None, self.callables)

    @property
    def is_unchanged(self) -> bool:
        """Whether all attributes are as `save_state` saved them; true before the first call."""
        return self._state is None or self._state.is_unchanged

    def describe_change(self) -> str:
        """Name of the first attribute that has changed."""
        assert self._state is not None
        return self._state.describe_change()

    @property
    def _variables(self) -> list[Any]:
        return list(self._metric.variables)

    def increments(self, targets: Any, predictions: Any) -> list[torch.Tensor]:
        """Increments of the variables by a batch, in their shapes; the metric stays unchanged."""
        zeros = [_zeros_like(variable.value) for variable in self._variables]
        return self._updated(zeros, targets, predictions)

    def _updated(
        self, sums: list[torch.Tensor], targets: Any, predictions: Any
    ) -> list[torch.Tensor]:
        """Values of the variables after an update that starts from `sums`, in their shapes. Local.

        The metric stays unchanged.
        """
        variables = self._variables
        with (
            torch.no_grad(),
            keras.StatelessScope(list(zip(variables, sums, strict=True))) as scope,
        ):
            keras_metrics.update_metrics(
                [self._metric], targets, predictions, [self._component], self._outputs
            )
        return [scope.get_current_value(variable) for variable in variables]

    def matches_keras(
        self, targets: Any, predictions: Any, increments: list[torch.Tensor], exact: bool
    ) -> bool:
        """Whether Keras' update adds the same to zeros, small sums, the present sums and larger ones.

        A custom metric may keep something that is no sum, such as a maximum. A start at twice the increment
        shows that, whatever the metric counts. Each variable is compared by itself.

        Args:
            targets: Targets of a slice, a pytree of tensors.
            predictions: Predictions for it, a pytree of tensors.
            increments: Captured increments, one per variable, in its shape.
            exact: Whether the sums from zero must be equal to the bit.
        """
        present = [variable.value.detach() for variable in self._variables]
        larger = [sums.abs() + 1 for sums in present]
        zeros = [_zeros_like(sums) for sums in present]
        small = [2 * each.detach().abs() for each in increments]
        for start in (zeros, small, present, larger):
            expected = self._updated(start, targets, predictions)
            actual = [sums + each for sums, each in zip(start, increments, strict=True)]
            for a, b in zip(expected, actual, strict=True):
                if not agree([a], [b], exact and start is zeros, [0.0]):
                    return False
        return True


def _zeros_like(tensor: torch.Tensor) -> torch.Tensor:
    """Zeros of a tensor's shape and dtype that do not depend on it: a constant of the graph."""
    return torch.zeros(tensor.shape, dtype=tensor.dtype, device=tensor.device)
