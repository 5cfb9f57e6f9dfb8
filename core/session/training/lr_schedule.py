"""Learning-rate schedule: a pure function of spec and step, the same for every backend."""

from __future__ import annotations

import math
from collections.abc import Callable

from isotrain.core.errors import SpecError
from isotrain.core.spec.schedules import ConstantSchedule, RunLength
from isotrain.core.spec.training_spec import TrainingSpec


class LearningRates:
    """Learning rate of every step of a run.

    Attributes:
        peak: Learning rate after scaling and warm-up, before any decay: what the schedule's fractions are of.
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
        if optimizer_schedule is not None and self._schedule != ConstantSchedule():
            raise SpecError(
                f"schedule: {self._schedule.name}, and the optimizer that optimizer.custom returned has a"
                " learning-rate schedule too. Leave one of the two out."
            )
        self._group_schedules = spec.optimizer.group_schedules
        self._run = RunLength(steps_per_epoch, total_steps)
        self._require_finite(total_steps - 1)

    def _require_finite(self, last: int) -> None:
        """Refuses a rate that overflows: a step schedule's factor above 1 makes it grow.

        Raises:
            SpecError: The rate of the last step is not finite.
        """
        try:
            rate = max(self(last), *self.of_groups(last).values(), 0.0)
        except OverflowError:
            rate = math.inf
        if not math.isfinite(rate):
            raise SpecError(
                f"schedule: the rate of the last step ({last}) is {rate}; expected a finite number. Give a"
                " factor below 1, or fewer decays."
            )

    def momentum(self, step: int) -> float | None:
        """Momentum of a step; None for the optimizer's, which is the same in every step."""
        return self._schedule.momentum(step, self._run)

    def of_groups(self, step: int) -> dict[int, float]:
        """Rates of a step by the schedules of optimizer groups, by index of the group; before `lr_factor`."""
        return {
            index: self.peak * schedule.fraction(step, self._run)
            for index, schedule in self._group_schedules.items()
        }

    def __call__(self, step: int) -> float:
        """Returns the learning rate of a step, counted from 0 over the whole run."""
        if self._optimizer_schedule is not None:
            return self._optimizer_schedule(step) * self._scale
        return self.peak * self._schedule.fraction(step, self._run)
