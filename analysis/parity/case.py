"""A divergent run together with everything that diagnosing its cause needs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from isotrain.analysis.parity.noise_floor import NoiseFloor
from isotrain.analysis.parity.records import Divergence
from isotrain.analysis.parity.run_trace import RunTrace, StepTrace, Tensors, relative
from isotrain.core.spec.training_spec import TrainingSpec

FITS = 1e-3
"""A hypothesis explains a tensor if the residual is below this fraction of its norm."""


@dataclass(frozen=True)
class DivergenceCase:
    """A run that diverges from the reference.

    Attributes:
        spec: Training spec of the run.
        run: Trace of the run.
        reference: Trace of the reference.
        floor: Noise floor of the reference.
        divergences: Divergences at the first step and stage, largest ratio to the noise floor first.
        other_precision: Trace of the reference in another precision; None if there is none.
    """

    spec: TrainingSpec
    run: RunTrace
    reference: RunTrace
    floor: NoiseFloor
    divergences: Sequence[Divergence]
    other_precision: RunTrace | None

    @property
    def first(self) -> Divergence:
        """The first divergence."""
        return self.divergences[0]

    @property
    def index(self) -> int:
        """Index of the first divergent step among the traced steps."""
        return next(i for i, s in enumerate(self.run.steps) if s.step == self.first.step)

    @property
    def run_step(self) -> StepTrace:
        """The first divergent step of the run."""
        return self.run.steps[self.index]

    @property
    def reference_step(self) -> StepTrace:
        """The same step of the reference."""
        return self.reference.steps[self.index]

    @property
    def are_gradients(self) -> bool:
        """Whether the first divergence is in the gradients."""
        return self.first.stage in ("gradient", "reduced")

    def evaluation(self) -> list[str]:
        """Evidence that the models agree in evaluation mode; empty if they do not."""
        one, other = self.run.evaluation_loss, self.reference.evaluation_loss
        difference = relative(one, other)
        if difference > self.floor.at(0, "loss", "loss"):
            return []
        return [f"in evaluation mode the two losses agree (relative difference {difference:.1g})"]


def stacked(tensors: Tensors) -> np.ndarray:
    """The sketches of all tensors concatenated, shape [sum of sketch lengths], float64."""
    return np.concatenate([tensor.sketch for tensor in tensors.values()])
