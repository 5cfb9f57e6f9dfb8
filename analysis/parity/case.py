"""A run that parts from the reference, and what its tensors are looked at by."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from isotrain.analysis.parity.noise_floor import NoiseFloor
from isotrain.analysis.parity.records import Divergence
from isotrain.analysis.parity.run_trace import RunTrace, StepTrace, Tensors, relative
from isotrain.core.spec.training_spec import TrainingSpec

FITS = 1e-3
"""A hypothesis explains a tensor when what is left unexplained is below this part of it."""


@dataclass(frozen=True)
class DivergenceCase:
    """A run that parts from the reference.

    Attributes:
        spec: What was trained.
        run: The run.
        reference: What it is compared with.
        floor: The noise floor around the reference.
        divergences: What parts at the first step and stage, the furthest first.
        other_precision: The reference in another precision, where there is such a run.
    """

    spec: TrainingSpec
    run: RunTrace
    reference: RunTrace
    floor: NoiseFloor
    divergences: Sequence[Divergence]
    other_precision: RunTrace | None

    @property
    def first(self) -> Divergence:
        """Where it parts, and furthest there."""
        return self.divergences[0]

    @property
    def index(self) -> int:
        """The place of that step among the traced ones."""
        return next(i for i, s in enumerate(self.run.steps) if s.step == self.first.step)

    @property
    def run_step(self) -> StepTrace:
        """That step of the run."""
        return self.run.steps[self.index]

    @property
    def reference_step(self) -> StepTrace:
        """That step of the reference."""
        return self.reference.steps[self.index]

    @property
    def are_gradients(self) -> bool:
        """Whether it parts in the gradients."""
        return self.first.stage in ("gradient", "reduced")

    def evaluation(self) -> list[str]:
        """Whether the models agree in evaluation mode, as a piece of evidence."""
        one, other = self.run.evaluation_loss, self.reference.evaluation_loss
        apart = relative(one, other)
        if apart > self.floor.at(0, "loss", "loss"):
            return []
        return [f"in evaluation mode the two losses agree (relative difference {apart:.1g})"]


def stacked(tensors: Tensors) -> np.ndarray:
    """The sketches of all tensors, one after the other."""
    return np.concatenate([tensor.sketch for tensor in tensors.values()])
