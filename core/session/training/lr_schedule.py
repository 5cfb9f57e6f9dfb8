"""Learning-rate schedule: a pure function of spec and step, the same for every backend."""

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
    """Learning rate of every step of a run.

    Attributes:
        peak: Learning rate after scaling and warm-up, before any decay.
    """

    def __init__(
        self,
        spec: TrainingSpec,
        optimizer_schedule: Callable[[int], float] | None = None,
        *,
        global_batch_size: int,
        steps_per_epoch: int,
        total_steps: int,
    ) -> None:
        """Reads schedule and scaling rule from the spec.

        Args:
            spec: Training spec, with the optimizer's rate, the schedule and the scaling rule.
            optimizer_schedule: Schedule of a custom optimizer: step to rate, before scaling. Replaces
                the spec's rate.
            global_batch_size: Number of samples per step over all replicas.
            steps_per_epoch: Number of steps per epoch.
            total_steps: Number of steps of the run.

        Raises:
            SpecError: Spec and optimizer both have a schedule, or the last rate is not finite.
        """
        self._scale = spec.scaling.factor(global_batch_size)
        self.peak = spec.optimizer.lr * self._scale
        self._optimizer_schedule = optimizer_schedule
        self._schedule = spec.schedule
        self._decays = not isinstance(spec.schedule, ConstantSchedule)
        if optimizer_schedule is not None and self._schedule != ConstantSchedule():
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
        """Refuses a rate that overflows: a step schedule's factor above 1 makes it grow.

        Raises:
            SpecError: The rate of the last step is not finite.
        """
        try:
            rate = self(last)
        except OverflowError:
            rate = math.inf
        if not math.isfinite(rate):
            raise SpecError(
                f"schedule: the rate of the last step ({last}) is {rate}; expected a finite number. Give a"
                " factor below 1, or fewer decays."
            )

    def __call__(self, step: int) -> float:
        """Returns the learning rate of a step, counted from 0 over the whole run.

        During the warm-up the rate rises linearly and reaches the peak with the last warm-up step
        (Goyal et al. 2017, section 2.2).
        """
        if self._optimizer_schedule is not None:
            return self._optimizer_schedule(step) * self._scale
        if step < self._warmup:
            start = self._schedule.warmup_from_fraction
            return self.peak * (start + (1 - start) * (step + 1) / self._warmup)
        return self.peak * self._decay(step) if self._decays else self.peak

    def _decay(self, step: int) -> float:
        """Fraction of the peak rate at a step after the warm-up."""
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
    """Decay from 1 to 0 as `remaining` falls: polynomial, or cosine (Loshchilov & Hutter 2017, eq. 5)."""
    if isinstance(schedule, PolynomialSchedule):
        return float(remaining**schedule.power)
    return (1 + math.cos(math.pi * (1 - remaining))) / 2
