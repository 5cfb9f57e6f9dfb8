"""The metrics of a portable model as a record adds them up.

Imported only after `keras_backend.claim`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import keras
import torch

from isotrain.adapters import chosen as choices
from isotrain.adapters import keras_losses, keras_parts
from isotrain.adapters.outputs import Outputs
from isotrain.adapters.torch.keras_metrics import KerasMetric
from isotrain.adapters.torch.metrics import Measured, as_chosen
from isotrain.adapters.torch.replaying.outcome import agree
from isotrain.plugin import Component, TrainingSpec, references

Losses = Mapping[str | None, keras_losses.OneLoss]


class PhaseMetrics:
    """The metrics of a portable model in training or in evaluation.

    Attributes:
        metrics: As a group adds them up.
        callables: What has attributes by which they compute.
    """

    def __init__(self, spec: TrainingSpec, outputs: Outputs, losses: Losses) -> None:
        """Makes them anew.

        Args:
            spec: Names them.
            outputs: Of the model.
            losses: That the steps compute, by output.
        """
        self._found, self._given = keras_losses.build_measures(spec, "torch", losses)
        own = [KerasMetric(metric) for metric in self._found]
        self.metrics = as_chosen(own, self._given, outputs)
        self.callables = [*self._found, *_own_functions(spec)]
        self._outputs = outputs

    @property
    def _variables(self) -> list[Any]:
        return [variable for metric in self._found for variable in metric.variables]

    def added(self, targets: Any, predictions: Any) -> list[torch.Tensor]:
        """What samples add to the sums of all metrics, in their order; nothing moves."""
        nothing = [_zeros_like(variable.value) for variable in self._variables]
        return self._after(nothing, targets, predictions)

    def _after(
        self, sums: list[torch.Tensor], targets: Any, predictions: Any
    ) -> list[torch.Tensor]:
        """What samples make of other sums; nothing moves."""
        variables = self._variables
        with (
            torch.no_grad(),
            keras.StatelessScope(list(zip(variables, sums, strict=True))) as scope,
        ):
            keras_parts.update_metrics(
                self._found, targets, predictions, self._given, self._outputs
            )
        return [scope.get_current_value(variable) for variable in variables]

    def would_add(self, targets: Any, found: Measured, exact: bool) -> bool:
        """Whether Keras adds the same: to nothing, to little, to the sums as they are, and to larger ones.

        Of a person's own metrics, some keep what is no sum, as a maximum; twice as much as is added shows it,
        whatever else there is to count. Each is compared by itself.
        """
        now = [variable.value.detach() for variable in self._variables]
        larger = [sums.abs() + 1 for sums in now]
        nothing = [_zeros_like(sums) for sums in now]
        little = [2 * added.detach().abs() for added in found.sums]
        for start in (nothing, little, now, larger):
            theirs = self._after(start, targets, found.predictions)
            ours = [sums + added for sums, added in zip(start, found.sums, strict=True)]
            for one, other in zip(theirs, ours, strict=True):
                if not agree([one], [other], exact and start is nothing, [0.0]):
                    return False
        return True

    @property
    def are_late(self) -> bool:
        """Whether one has yet to make its sums, of samples."""
        return any(metric.is_late for metric in self.metrics)


def _zeros_like(tensor: torch.Tensor) -> torch.Tensor:
    """Made of nothing, so that a record has them as a constant."""
    return torch.zeros(tensor.shape, dtype=tensor.dtype, device=tensor.device)


def _own_functions(spec: TrainingSpec) -> list[Any]:
    """A person's functions and objects among the metrics."""
    chosen: list[Component] = [choices.select(given, "torch", "metrics") for given in spec.metrics]
    own = [references.resolve(each.name) for each in chosen if each.is_reference]
    return [each for each in own if not isinstance(each, type)]
