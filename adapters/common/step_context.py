"""Base of the step contexts of all frameworks: refuses collectives that would give other results."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from isotrain.plugin import SpecError, StepContext

if TYPE_CHECKING:
    from isotrain.plugin import TrainingSpec


class CommonStepContext(StepContext):
    """Step context of the replicas of one process.

    Attributes:
        communicates: Whether an objective has called a collective.
        is_alone: Whether this replica tries a pass that the others do not take part in.
    """

    def __init__(self, spec: TrainingSpec, frozen: Mapping[str, Callable[..., Any]]) -> None:
        """Starts without values.

        Args:
            spec: Training spec.
            frozen: Frozen models by name.
        """
        self.is_training = False
        self.values = {}
        self.frozen = frozen
        self.communicates = False
        self.is_alone = False
        self._refusal = (
            "with gradient_accumulation_steps it would see the micro-batch alone. Leave that out"
            if spec.gradient_accumulation_steps > 1
            else None
        )

    def require_collective(self, method: str) -> None:
        """Refuses a collective whose result would not be that of the global batch.

        Args:
            method: Name of the collective.

        Raises:
            SpecError: The batch is split in time, or replicas train weights of their own.
        """
        self.communicates = True
        if self._refusal is not None:
            raise SpecError(f"objective: step.{method}: {self._refusal}.")

    def refuse_workers(self) -> None:
        """Refuses collectives from now on: a worker of a parameter-server run computes alone."""
        self._refusal = (
            "a worker of a parameter-server run computes alone. Use strategy data-parallel"
        )

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """Context of passes of this replica alone: batch normalizations use its samples."""
        self.is_alone = True
        try:
            yield
        finally:
            self.is_alone = False

    @contextlib.contextmanager
    def local(self) -> Iterator[None]:
        """Context of a step of this replica alone: collectives are refused in it."""
        refusal, self._refusal = (
            self._refusal,
            (
                "under this strategy each replica updates weights of its own in this step, so that a loss"
                " over all replicas has no gradient. Use strategy data-parallel"
            ),
        )
        try:
            yield
        finally:
            self._refusal = refusal
