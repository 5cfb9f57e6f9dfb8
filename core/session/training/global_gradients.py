"""Gradients of the mean loss over the global batch, for loops of one's own and the spec's `gradients`."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

from isotrain.core.contracts.backend.computations import average_gradients, unflatten
from isotrain.core.contracts.backend.group_protocols import FreezingGroup
from isotrain.core.contracts.backend.replica import Replica, Tensor
from isotrain.core.contracts.backend.replica_group import ReplicaGroup
from isotrain.core.contracts.reporter import Reporter
from isotrain.core.contracts.strategy import require_backend_step
from isotrain.core.data.batch import Batch
from isotrain.core.errors import SpecError
from isotrain.core.session.training.context import SessionContext
from isotrain.core.session.training.ordered_steps import OrderedSteps, require_equal_layers
from isotrain.core.session.training.outlier_parts import OutlierParts
from isotrain.core.session.training.verified_parts import VerifiedParts
from isotrain.core.spec import import_strings
from isotrain.core.spec.training_spec import TrainingSpec


class GlobalGradients:
    """Mean gradients over the global batch, and the spec's function of them."""

    def __init__(
        self, spec: TrainingSpec, session_context: SessionContext, reporter: Reporter
    ) -> None:
        """Resolves the function that the spec names for the framework of the run.

        Args:
            spec: Training spec of the update.
            session_context: What the process trains with.
            reporter: Sends events to the launcher.
        """
        self._session_context = session_context
        self._strategy = session_context.strategy
        self._reporter = reporter
        self._spec = spec
        self._ordered_steps: OrderedSteps | None = None
        self._computation: Callable[..., Any] | None = None
        self._function: Callable[..., Any] | None = None
        if spec.gradients is not None:
            framework = session_context.plan.framework
            self._function = import_strings.resolve(spec.for_framework("gradients", framework))

    @property
    def are_computed_here(self) -> bool:
        """Whether steps take gradients of this class: the spec has a function of them, or orders sums."""
        return self._function is not None or self._spec.reproducible is not None

    def of(self, group: ReplicaGroup, batch: Batch) -> tuple[list[list[Tensor]], Tensor]:
        """Mean gradients over the global batch, as `Session.gradients`. Collective."""
        if self._spec.reproducible is not None:
            if self._ordered_steps is None:
                require_equal_layers(group, self._spec)
                shares = self._session_context.shares
                outliers = self._outlier_parts(group)
                verified = VerifiedParts(group, self._session_context.plan.processes)
                self._ordered_steps = OrderedSteps(group, shares, outliers, verified)
            return self._ordered_steps.gradients(batch)
        require_backend_step(self._strategy, "session.gradients")
        gradients, loss = group.gradients(batch)
        if group.replicas > 1:
            weights = group.replica_weights(batch)
            can_freeze = isinstance(group, FreezingGroup)
            part = "changing-statistics" if can_freeze else "statistics"
            gradients = group.compute(average_gradients, gradients, *weights, static=part)
        return gradients, loss

    def _outlier_parts(self, group: ReplicaGroup) -> OutlierParts | None:
        """The filter of parts of the global batch; None without `drop_outliers`."""
        times, reporter = self._spec.drop_outliers, self._reporter
        if times is None:
            return None
        processes = self._session_context.plan.processes
        return OutlierParts(group, times, processes, None if reporter.rank else reporter.warn)

    def apply(
        self, group: ReplicaGroup, gradients: Sequence[Sequence[Tensor]], rate: float
    ) -> None:
        """Applies mean gradients of the weights' shapes, transformed by the spec's function.

        Collective under strategy sharded with `reproducible`; else local.
        """
        if self._spec.reproducible is None:
            require_backend_step(self._strategy, "session.apply_gradients")
        if self._function is not None:
            if self._computation is None:
                names = list(group.describe_state(("trainable",)))
                self._computation = _computation(self._function, names)
            gradients = group.compute(self._computation, gradients)
        self._strategy.apply_gradients(group, gradients, rate)


def _computation(function: Callable[..., Any], names: list[str]) -> Callable[..., Any]:
    """Computation that transforms the gradients of one replica, in the order of the names."""

    takes_weights = len(inspect.signature(function).parameters) > 2

    def transform(replica: Replica, gradients: Sequence[Tensor]) -> list[Tensor]:
        arguments = [list(gradients)]
        if takes_weights:
            arguments.append(unflatten(replica.ops, replica.read(("trainable",)), gradients))
        transformed = function(names, *arguments)
        shapes = [tuple(gradient.shape) for gradient in gradients]
        if not isinstance(transformed, list | tuple) or len(transformed) != len(names):
            raise SpecError(
                f"gradients: {import_strings.describe(function)!r} returned {transformed!r:.80}; expected a"
                f" list of {len(names)} gradients, one for each name."
            )
        for name, gradient, shape in zip(names, transformed, shapes, strict=True):
            if tuple(gradient.shape) != shape:
                raise SpecError(
                    f"gradients: {import_strings.describe(function)!r} returned shape"
                    f" {tuple(gradient.shape)} for {name}; expected {shape}."
                )
        return list(transformed)

    return transform
