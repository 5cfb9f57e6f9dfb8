"""The learning rate of each step: a pure function of the spec, never of backend or replicas."""

from __future__ import annotations

import math
from collections.abc import Callable

from isotrain.core.errors import SpecError
from isotrain.core.spec.sections import (
    ConstantSchedule,
    CosineSchedule,
    PolynomialSchedule,
    StepSchedule,
)
from isotrain.core.spec.training_spec import TrainingSpec


class LearningRates:
    """Gives the rate of every step of a run.

    Attributes:
        peak: The rate after scaling and warm-up, before any decay.
    """

    def __init__(
        self,
        spec: TrainingSpec,
        own: Callable[[int], float] | None = None,
        *,
        global_batch_size: int,
        steps_per_epoch: int,
        total_steps: int,
    ) -> None:
        """Fixes the run's lengths.

        Args:
            spec: Gives the optimizer's rate, the schedule and the scaling rule.
            own: The schedule that the spec's own optimizer came with; gives all rates, before scaling.
            global_batch_size: Samples of one step over all replicas.
            steps_per_epoch: Steps of one epoch.
            total_steps: Steps of the whole run.

        Raises:
            SpecError: There are two schedules, or the rate grows beyond all numbers.
        """
        self._scale = spec.scaling.factor(global_batch_size)
        self.peak = spec.optimizer.lr * self._scale
        self._own = own
        self._schedule = spec.schedule
        self._decays = not isinstance(spec.schedule, ConstantSchedule)
        if own is not None and self._schedule != ConstantSchedule():
            raise SpecError(
                f"schedule: {self._schedule.name}, and the optimizer that optimizer.custom returned has a"
                " learning-rate schedule too. Leave one of the two out."
            )
        self._steps_per_epoch = steps_per_epoch
        self._warmup = self._schedule.warmup_steps or (
            (self._schedule.warmup_epochs or 0) * steps_per_epoch
        )
        self._total = total_steps
        self._require_finite(total_steps - 1)

    def _require_finite(self, last: int) -> None:
        """A factor above 1 makes the rate grow.

        Raises:
            SpecError: It grows beyond all numbers.
        """
        try:
            rate = self(last)
        except OverflowError:
            rate = math.inf
        if not math.isfinite(rate):
            raise SpecError(
                f"schedule: the rate of the last step ({last}) is {rate}, which is no rate. Give a factor"
                " below 1, or fewer decays."
            )

    def __call__(self, step: int) -> float:
        """Returns the rate of a step, counted from 0 over the whole run.

        During the warm-up the rate rises linearly and reaches the peak with the last warm-up step
        (Goyal et al. 2017, section 2.2).
        """
        if self._own is not None:
            return self._own(step) * self._scale
        if step < self._warmup:
            start = self._schedule.warmup_from_fraction
            return self.peak * (start + (1 - start) * (step + 1) / self._warmup)
        return self.peak * self._decay(step) if self._decays else self.peak

    def _decay(self, step: int) -> float:
        """The fraction of the peak that the schedule leaves at this step."""
        schedule = self._schedule
        if isinstance(schedule, StepSchedule):
            interval = schedule.every_steps or (
                (schedule.every_epochs or 1) * self._steps_per_epoch
            )
            return schedule.factor ** (step // interval)
        if isinstance(schedule, CosineSchedule | PolynomialSchedule):
            length = schedule.decay_steps or max(1, self._total - self._warmup)
            remaining = 1 - min(1.0, (step - self._warmup) / length)
            return schedule.final_fraction + (1 - schedule.final_fraction) * _shape(
                schedule, remaining
            )
        return 1.0


def _shape(schedule: CosineSchedule | PolynomialSchedule, remaining: float) -> float:
    """Falls from 1 to 0 as `remaining` does; the cosine is that of Loshchilov & Hutter 2017, eq. 5."""
    if isinstance(schedule, PolynomialSchedule):
        return float(remaining**schedule.power)
    return (1 + math.cos(math.pi * (1 - remaining))) / 2
