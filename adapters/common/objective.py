"""An objective of a spec for one framework: how it is called, and what it may return."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from isotrain.adapters.common.outputs import objective_batch
from isotrain.adapters.common.spec_components import resolve_for_framework
from isotrain.plugin import SpecError, import_strings, takes_step

if TYPE_CHECKING:
    from isotrain.plugin import FrozenModel, StepContext, TrainingSpec

MAX_LOSSES = 32
"""Number of losses, named or weighted, that an objective may return: accumulators have fixed shapes."""


@dataclass
class ObjectiveResult:
    """Losses and predictions that an objective returned.

    Attributes:
        losses: Losses by name: one tensor, or a `WeightedLosses`, each; the name None for a single loss.
        predictions: Predictions for the metrics; None where it returned none.
    """

    losses: Mapping[str | None, Any]
    predictions: Any


@dataclass
class Objective:
    """An objective of the spec for one framework. Calls it with the step where it has a third parameter.

    Attributes:
        function: The objective itself.
        step: Step context to pass; None for objectives of two parameters.
        names: Names of its losses, once it has returned a table of them; empty for a single loss.
    """

    function: Any
    step: StepContext | None
    names: tuple[str, ...] | None = None
    _last_call: threading.local = field(default_factory=threading.local)

    @classmethod
    def of(
        cls, spec: TrainingSpec, framework: str, step: StepContext | None = None
    ) -> Objective | None:
        """The objective of a spec; None where it has a loss.

        Args:
            spec: Training spec.
            framework: Framework whose objective is used, where the spec has one per framework.
            step: Step context of the replica; None for backends without one.

        Raises:
            SpecError: It takes a step, and the backend has none.
        """
        if spec.objective is None:
            return None
        function = resolve_for_framework(spec.objective, framework, "objective")
        if not takes_step(function):
            return cls(function, None)
        if step is None:
            raise SpecError(
                f"objective: {import_strings.describe(function)} has a third parameter, and this backend"
                " gives objectives no step. Let it take (model, batch)."
            )
        return cls(function, step)

    def __call__(self, model: Any, inputs: Any, targets: Any, training: bool) -> Any:
        """Calls the objective; `result` reads what it returns.

        Args:
            model: Model to train.
            inputs: Inputs of a slice.
            targets: Targets of a slice, with sample weights where there are some.
            training: Whether the model trains.
        """
        self._last_call.inputs = inputs
        batch = objective_batch(inputs, targets)
        if self.step is None:
            return self.function(model, batch)
        self.step.is_training = training
        return self.function(model, batch, self.step)

    def result(self, result: Any) -> ObjectiveResult:
        """Losses and predictions of what the objective returned.

        Raises:
            SpecError: It returned too many losses, or names that cannot be.
        """
        losses, predictions = result if isinstance(result, tuple) else (result, None)
        if not isinstance(losses, Mapping):
            self.names = ()
            return ObjectiveResult({None: losses}, predictions)
        names = tuple(losses)
        if not 0 < len(names) <= MAX_LOSSES or not all(_is_name(name) for name in names):
            raise SpecError(
                f"objective: expected 1 to {MAX_LOSSES} losses with texts other than 'loss' as names,"
                f" received {', '.join(map(repr, names)) or 'none'}."
            )
        if self.names and self.names != names:
            raise SpecError(
                f"objective: expected the losses {', '.join(self.names)} in every call, received"
                f" {', '.join(names)}."
            )
        self.names = names
        return ObjectiveResult(losses, predictions)

    @property
    def inputs(self) -> Any:
        """Inputs of this thread's last call."""
        return self._last_call.inputs

    @property
    def latest(self) -> Any:
        """Means of this thread's last call in order, each with its denominator (None: the samples)."""
        return self._last_call.terms

    @latest.setter
    def latest(self, terms: Any) -> None:
        self._last_call.terms = terms


def _is_name(name: Any) -> bool:
    return isinstance(name, str) and name not in ("", "loss")


def frozen_specs(spec: TrainingSpec) -> list[tuple[FrozenModel, TrainingSpec]]:
    """The frozen models of a spec, each with a spec that builds it."""
    changes: dict[str, Any] = {"initial_weights": None, "recompute": (), "call": None}
    return [
        (
            each,
            spec.model_copy(update={"model": each.model, "model_args": each.model_args, **changes}),
        )
        for each in spec.frozen.values()
    ]
