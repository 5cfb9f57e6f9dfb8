"""One metric of a portable model: what samples add to it, and what that depends on besides tensors.

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
    """A Keras metric as a record adds to it.

    Attributes:
        name: As a group shows it.
        callables: What has attributes by which it computes.
    """

    def __init__(
        self,
        name: str,
        metric: keras.metrics.Metric,
        given: Component,
        outputs: OutputSelector,
        functions: Sequence[Any],
    ) -> None:
        """Adds nothing yet.

        Args:
            name: As a group shows it.
            metric: Keras'.
            given: What the spec says of it.
            outputs: Of the model.
            functions: A person's own, and objects, that it calls.
        """
        self.name = name
        self.callables = [metric, *functions]
        self._metric = metric
        self._given = given
        self._outputs = outputs
        self._state: PythonState | None = None

    def remember(self) -> None:
        """Remembers what its attributes are and hold."""
        self._state = PythonState(None, self.callables)

    @property
    def is_unchanged(self) -> bool:
        """Whether every attribute is and holds what it was and held when `remember` was called."""
        return self._state is None or self._state.is_unchanged

    def change(self) -> str:
        """The first attribute that is another now."""
        assert self._state is not None
        return self._state.change()

    @property
    def _variables(self) -> list[Any]:
        return list(self._metric.variables)

    def added(self, targets: Any, predictions: Any) -> list[torch.Tensor]:
        """What samples add to its sums; nothing moves."""
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
            keras_metrics.update_metrics(
                [self._metric], targets, predictions, [self._given], self._outputs
            )
        return [scope.get_current_value(variable) for variable in variables]

    def would_add(
        self, targets: Any, predictions: Any, added: list[torch.Tensor], exact: bool
    ) -> bool:
        """Whether Keras adds the same: to nothing, to little, to the sums as they are, and to larger ones.

        Of a person's own metrics, some keep what is no sum, as a maximum; twice as much as is added shows it,
        whatever else there is to count. Each sum is compared by itself.
        """
        now = [variable.value.detach() for variable in self._variables]
        larger = [sums.abs() + 1 for sums in now]
        nothing = [_zeros_like(sums) for sums in now]
        little = [2 * each.detach().abs() for each in added]
        for start in (nothing, little, now, larger):
            theirs = self._after(start, targets, predictions)
            ours = [sums + each for sums, each in zip(start, added, strict=True)]
            for one, other in zip(theirs, ours, strict=True):
                if not agree([one], [other], exact and start is nothing, [0.0]):
                    return False
        return True


def _zeros_like(tensor: torch.Tensor) -> torch.Tensor:
    """Made of nothing, so that a record has them as a constant."""
    return torch.zeros(tensor.shape, dtype=tensor.dtype, device=tensor.device)
