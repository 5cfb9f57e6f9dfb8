"""Learning-rate schedules of the spec: the fields of each, and the fraction of the peak rate at a step."""

from __future__ import annotations

import bisect
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Discriminator, Field

from isotrain.core.errors import SpecError
from isotrain.core.spec import import_strings
from isotrain.core.spec.checkpoint_policy import MonitoredMetric
from isotrain.core.spec.choices import as_call, branch_of, named_choice, names_of, tag
from isotrain.core.spec.field_types import (
    Count,
    CountOrZero,
    Decay,
    Fraction,
    NotNegative,
    Positive,
    Reference,
    one_of_schema,
    require_name,
)
from isotrain.core.spec.validation import Problem, SpecModel, at_most_one, exactly_one


@dataclass(frozen=True)
class RunLength:
    """Length of a run in steps.

    Attributes:
        steps_per_epoch: Number of steps per epoch.
        total_steps: Number of steps of the run.
    """

    steps_per_epoch: int
    total_steps: int

    def in_steps(self, steps: int | None, epochs: int | None) -> int:
        """A duration in steps that is given in steps or in epochs; 0 if it is given in neither."""
        return steps or (epochs or 0) * self.steps_per_epoch


class Warmup(SpecModel):
    """Base of the schedules: a linear warm-up to the peak rate, then what the subclass says."""

    warmup_steps: CountOrZero | None = Field(
        default=None, description="Steps in which the rate rises linearly; not with warmup_epochs."
    )
    warmup_epochs: CountOrZero | None = Field(
        default=None, description="Epochs in which the rate rises linearly; not with warmup_steps."
    )
    warmup_from_fraction: Fraction = Field(
        default=0.0, description="Fraction of the rate at which the warm-up starts."
    )

    @classmethod
    def rules(cls, fields: Mapping[str, Any]) -> Iterator[Problem]:
        """Refuses a warm-up in both steps and epochs."""
        yield from at_most_one(fields, "warmup_steps", "warmup_epochs")

    @property
    def has_warmup(self) -> bool:
        """Whether the rate rises at the start of the run."""
        return bool(self.warmup_steps or self.warmup_epochs)

    def fraction(self, step: int, run: RunLength) -> float:
        """Fraction of the peak rate at a step, counted from 0 over the whole run.

        During the warm-up the rate rises linearly and reaches the peak with the last warm-up step
        (Goyal et al. 2017, section 2.2).
        """
        warmup = run.in_steps(self.warmup_steps, self.warmup_epochs)
        if step < warmup:
            start = self.warmup_from_fraction
            return start + (1 - start) * (step + 1) / warmup
        return self.fraction_after_warmup(step, warmup, run)

    def fraction_after_warmup(self, step: int, warmup: int, run: RunLength) -> float:
        """Fraction of the peak rate at a step that is not before `warmup`, the number of warm-up steps."""
        return 1.0

    def momentum(self, step: int, run: RunLength) -> float | None:
        """Momentum at a step; None for that of the optimizer."""
        return None


def _name_and_one_of(*names: str) -> Callable[[dict[str, Any]], None]:
    """JSON Schema change that requires the name, and one of the fields."""

    def change(schema: dict[str, Any]) -> None:
        require_name(schema)
        schema.update(one_of_schema(names))

    return change


class ConstantSchedule(Warmup):
    """Constant learning rate after the warm-up."""

    name: Literal["constant"] = "constant"


class _IntervalSchedule(Warmup, json_schema_extra=_name_and_one_of("every_epochs", "every_steps")):
    every_epochs: Count | None = Field(default=None, description="Interval in epochs.")
    every_steps: Count | None = Field(default=None, description="Interval in steps.")
    factor: Positive = Field(description="What the rate is multiplied by in each interval.")

    @classmethod
    def rules(cls, fields: Mapping[str, Any]) -> Iterator[Problem]:
        """Requires one interval, in epochs or steps."""
        yield from super().rules(fields)
        yield from exactly_one(fields, "every_epochs", "every_steps")


class StepSchedule(_IntervalSchedule):
    """Step decay: the learning rate is multiplied by a factor at regular intervals of the run."""

    name: Literal["step"] = "step"

    def fraction_after_warmup(self, step: int, warmup: int, run: RunLength) -> float:
        return self.factor ** (step // run.in_steps(self.every_steps, self.every_epochs))


class ExponentialSchedule(_IntervalSchedule):
    """Exponential decay: as step decay, but smooth, and from the end of the warm-up."""

    name: Literal["exponential"] = "exponential"

    def fraction_after_warmup(self, step: int, warmup: int, run: RunLength) -> float:
        interval = run.in_steps(self.every_steps, self.every_epochs)
        return float(self.factor ** ((step - warmup) / interval))


class MilestonesSchedule(Warmup, json_schema_extra=_name_and_one_of("at_epochs", "at_steps")):
    """Decay at milestones: the learning rate is multiplied by a factor at each."""

    name: Literal["milestones"] = "milestones"
    at_epochs: tuple[Count, ...] | None = Field(
        default=None, description="Milestones in epochs from the start of the run."
    )
    at_steps: tuple[Count, ...] | None = Field(
        default=None, description="Milestones in steps from the start of the run."
    )
    factor: NotNegative = Field(
        default=0.1, description="What the rate is multiplied by at each milestone."
    )

    @classmethod
    def rules(cls, fields: Mapping[str, Any]) -> Iterator[Problem]:
        """Requires milestones, in epochs or steps."""
        yield from super().rules(fields)
        yield from exactly_one(fields, "at_epochs", "at_steps")

    def fraction_after_warmup(self, step: int, warmup: int, run: RunLength) -> float:
        steps = self.at_steps or [each * run.steps_per_epoch for each in self.at_epochs or ()]
        return float(self.factor ** bisect.bisect_right(sorted(steps), step))


class _DecaySchedule(Warmup, json_schema_extra=require_name):
    final_fraction: Fraction = Field(default=0.0, description="Fraction of the rate at the end.")
    decay_steps: Count | None = Field(
        default=None, description="Steps of the decay after the warm-up; null for the whole run."
    )

    def fraction_after_warmup(self, step: int, warmup: int, run: RunLength) -> float:
        length = self.decay_steps or max(1, run.total_steps - warmup)
        remaining = 1 - min(1.0, (step - warmup) / length)
        return self.final_fraction + (1 - self.final_fraction) * self._shape(remaining)

    def _shape(self, remaining: float) -> float:
        """Decay from 1 to 0 as the remaining fraction of its steps falls from 1 to 0."""
        return remaining


class LinearSchedule(_DecaySchedule):
    """Linear decay of the learning rate."""

    name: Literal["linear"] = "linear"


class CosineSchedule(_DecaySchedule):
    """Cosine decay of the learning rate."""

    name: Literal["cosine"] = "cosine"

    def _shape(self, remaining: float) -> float:
        return _half_cosine(1 - remaining)


class PolynomialSchedule(_DecaySchedule):
    """Polynomial decay: the learning rate follows a power of the remaining fraction of the run."""

    name: Literal["polynomial"] = "polynomial"
    power: Positive = Field(default=1.0, description="Exponent; 1 is a straight line.")

    def _shape(self, remaining: float) -> float:
        return float(remaining**self.power)


class CosineRestartsSchedule(
    Warmup, json_schema_extra=_name_and_one_of("first_epochs", "first_steps")
):
    """Cosine decay with warm restarts (Loshchilov & Hutter 2017): each cycle begins at a peak again."""

    name: Literal["cosine-restarts"] = "cosine-restarts"
    first_epochs: Count | None = Field(
        default=None, description="Length of the first cycle in epochs."
    )
    first_steps: Count | None = Field(
        default=None, description="Length of the first cycle in steps."
    )
    length_factor: Annotated[float, Field(strict=True, ge=1, allow_inf_nan=False)] = Field(
        default=1.0, description="How many times longer each cycle is than the one before it."
    )
    peak_factor: Positive = Field(
        default=1.0, description="What the rate at the start of a cycle is multiplied by each time."
    )
    final_fraction: Fraction = Field(
        default=0.0, description="Fraction of the rate at the end of a cycle."
    )

    @classmethod
    def rules(cls, fields: Mapping[str, Any]) -> Iterator[Problem]:
        """Requires the length of the first cycle, in epochs or steps."""
        yield from super().rules(fields)
        yield from exactly_one(fields, "first_epochs", "first_steps")

    def fraction_after_warmup(self, step: int, warmup: int, run: RunLength) -> float:
        length: float = run.in_steps(self.first_steps, self.first_epochs)
        position, peak = float(step - warmup), 1.0
        while position >= length:
            position, length, peak = (
                position - length,
                length * self.length_factor,
                peak * self.peak_factor,
            )
        shape = peak * _half_cosine(position / length)
        return self.final_fraction + (1 - self.final_fraction) * shape


class InverseSqrtSchedule(Warmup, json_schema_extra=require_name):
    """Inverse square root of the step (Vaswani et al. 2017), equal to the peak at the warm-up's end."""

    name: Literal["inverse-sqrt"] = "inverse-sqrt"
    timescale_steps: Count | None = Field(
        default=None,
        description="Steps after which the decay is by 1/sqrt(2); null: the steps of the warm-up, or"
        " 10000 without one.",
    )

    def fraction_after_warmup(self, step: int, warmup: int, run: RunLength) -> float:
        timescale = self.timescale_steps or warmup or 10_000
        return 1 / math.sqrt((step - warmup + timescale) / timescale)


class WsdSchedule(Warmup, json_schema_extra=require_name):
    """Warm-up, stable, decay: the learning rate stays at its peak until the decay at the end of the run."""

    name: Literal["wsd"] = "wsd"
    decay_fraction: Fraction = Field(
        default=0.1, description="Fraction of the run's steps in which the rate decays."
    )
    decay_steps: Count | None = Field(
        default=None, description="Steps in which the rate decays; null: as decay_fraction says."
    )
    shape: Literal["linear", "cosine", "1-sqrt"] = Field(
        default="linear", description="How it decays; 1-sqrt: by the root of the decay's progress."
    )
    final_fraction: Fraction = Field(default=0.0, description="Fraction of the rate at the end.")

    @classmethod
    def rules(cls, fields: Mapping[str, Any]) -> Iterator[Problem]:
        """Refuses two lengths of the decay."""
        yield from super().rules(fields)
        yield from at_most_one(fields, "decay_fraction", "decay_steps")

    def fraction_after_warmup(self, step: int, warmup: int, run: RunLength) -> float:
        length = self.decay_steps or math.ceil(self.decay_fraction * run.total_steps)
        progress = (step - (run.total_steps - length)) / max(1, length)
        shape = _SHAPES[self.shape](min(1.0, max(0.0, progress)))
        return self.final_fraction + (1 - self.final_fraction) * shape


class OneCycleSchedule(SpecModel, json_schema_extra=require_name):
    """One cycle (Smith & Topin 2018): up to the peak rate and down to nearly 0, momentum the other way."""

    name: Literal["one-cycle"] = "one-cycle"
    rise_fraction: Fraction = Field(
        default=0.3, description="Fraction of the run's steps in which the rate rises."
    )
    start_fraction: Fraction = Field(
        default=0.04, description="Fraction of the peak rate at the first step."
    )
    final_fraction: Fraction = Field(
        default=4e-6, description="Fraction of the peak rate at the last step."
    )
    shape: Literal["cosine", "linear"] = Field(
        default="cosine", description="How the rate and the momentum change."
    )
    momentum_range: tuple[Decay, Decay] | None = Field(
        default=None,
        description="Lowest and highest momentum, such as [0.85, 0.95]: the momentum of sgd and rmsprop or"
        " beta_1 falls while the rate rises, and rises while it falls; null: it does not change.",
    )

    @property
    def has_warmup(self) -> bool:
        """Whether the rate rises at the start of the run."""
        return self.rise_fraction > 0

    def fraction(self, step: int, run: RunLength) -> float:
        """Fraction of the peak rate at a step, counted from 0 over the whole run."""
        return self._between(step, run, self.start_fraction, 1.0, self.final_fraction)

    def momentum(self, step: int, run: RunLength) -> float | None:
        """Momentum at a step; None for that of the optimizer."""
        if self.momentum_range is None:
            return None
        low, high = self.momentum_range
        return self._between(step, run, high, low, high)

    def _between(self, step: int, run: RunLength, start: float, middle: float, end: float) -> float:
        """Value between those at the first step, at the end of the rise and at the last step."""
        last = run.total_steps - 1
        peak = self.rise_fraction * run.total_steps - 1
        if step <= peak or step == peak == last:
            begin, until, progress = start, middle, step / peak if peak > 0 else 1.0
        else:
            peak = max(0.0, peak)
            begin, until, progress = middle, end, (step - peak) / max(1.0, last - peak)
        return until + (begin - until) * _SHAPES[self.shape](min(1.0, progress))


class PlateauSchedule(Warmup, MonitoredMetric, json_schema_extra=require_name):
    """Reduction on a plateau: the rate falls after an epoch or evaluation if a metric stops improving."""

    name: Literal["plateau"] = "plateau"
    factor: Annotated[float, Field(strict=True, gt=0, lt=1)] = Field(
        default=0.1, description="What the rate is multiplied by."
    )
    patience: Count = Field(
        default=10,
        description="Evaluated epochs without a better value after which it falls; evaluations where "
        "`evaluation.every_epochs` is 0.",
    )
    cooldown: CountOrZero = Field(
        default=0,
        description="Evaluated epochs or evaluations after a reduction that are not counted.",
    )
    min_delta: NotNegative = Field(
        default=1e-4, description="By how much a value must be better to count."
    )
    min_fraction: Fraction = Field(
        default=0.0, description="Fraction of the rate below which it does not fall."
    )

    @classmethod
    def rules(cls, fields: Mapping[str, Any]) -> Iterator[Problem]:
        """Refuses two warm-ups, and a metric whose better direction is unknown."""
        yield from Warmup.rules(fields)
        yield from MonitoredMetric.rules(fields)


class CallableSchedule(Warmup):
    """A schedule of your own: a function from the step to the fraction of the peak rate."""

    name: ClassVar[str] = "call"
    call: Reference = Field(
        description="Callable step -> fraction of the peak rate, 0 or larger; steps count from 0 over the"
        " whole run. It is not called for the steps of a warm-up."
    )

    def fraction_after_warmup(self, step: int, warmup: int, run: RunLength) -> float:
        value = import_strings.resolve(self.call)(step)
        try:
            fraction = float(value)
        except (TypeError, ValueError):
            fraction = math.nan
        if not 0 <= fraction < math.inf:
            raise SpecError(
                f"schedule: {import_strings.describe(self.call)} returned {value!r:.80} for step {step};"
                " expected a finite number, 0 or larger: the fraction of the peak rate."
            )
        return fraction


def _half_cosine(progress: float) -> float:
    """Cosine from 1 to 0 as progress rises from 0 to 1 (Loshchilov & Hutter 2017, eq. 5)."""
    return (1 + math.cos(math.pi * progress)) / 2


_SHAPES: dict[str, Callable[[float], float]] = {
    "linear": lambda progress: 1 - progress,
    "cosine": _half_cosine,
    "1-sqrt": lambda progress: 1 - math.sqrt(progress),
}
"""Shapes of a decay from 1 to 0, by progress from 0 to 1."""

_Schedules = (
    Annotated[ConstantSchedule, tag(ConstantSchedule)]
    | Annotated[StepSchedule, tag(StepSchedule)]
    | Annotated[MilestonesSchedule, tag(MilestonesSchedule)]
    | Annotated[ExponentialSchedule, tag(ExponentialSchedule)]
    | Annotated[LinearSchedule, tag(LinearSchedule)]
    | Annotated[CosineSchedule, tag(CosineSchedule)]
    | Annotated[PolynomialSchedule, tag(PolynomialSchedule)]
    | Annotated[CosineRestartsSchedule, tag(CosineRestartsSchedule)]
    | Annotated[InverseSqrtSchedule, tag(InverseSqrtSchedule)]
    | Annotated[WsdSchedule, tag(WsdSchedule)]
    | Annotated[OneCycleSchedule, tag(OneCycleSchedule)]
    | Annotated[PlateauSchedule, tag(PlateauSchedule)]
    | Annotated[CallableSchedule, tag(CallableSchedule)]
)
SCHEDULES = names_of(_Schedules)
SCHEDULES_WITH_DEFAULTS = names_of(_Schedules, without_required=True)
"""Schedules that a bare name selects, with all defaults."""
Schedule = Annotated[
    _Schedules,
    Discriminator(branch_of),
    BeforeValidator(named_choice("a schedule", SCHEDULES, "constant", "call")),
    BeforeValidator(as_call),
]
