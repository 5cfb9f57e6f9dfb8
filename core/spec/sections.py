"""Sections of the spec: optimizer choice, schedules, orders, scaling, evaluation, strategy, loggers, ..."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal, Self

from pydantic import (
    BeforeValidator,
    Discriminator,
    Field,
)

from isotrain.core.spec.choices import as_call, branch_of, named_choice, names_of, tag
from isotrain.core.spec.field_types import (
    Count,
    CountOrZero,
    Decay,
    Options,
    Positive,
    Switch,
    Text,
    one_of_schema,
)
from isotrain.core.spec.optimizers import (
    Adagrad,
    Adam,
    AdamW,
    CustomOptimizer,
    Lamb,
    Lion,
    Muon,
    Nadam,
    Radam,
    RmsProp,
    Sgd,
)
from isotrain.core.spec.orders import (
    BalancedOrder,
    ByLengthOrder,
    CallableOrder,
    RepeatedOrder,
    SequentialOrder,
    ShuffledOrder,
    WeightedOrder,
)
from isotrain.core.spec.validation import (
    ExpectedText,
    Problem,
    SpecModel,
    exactly_one,
)

_Optimizers = (
    Annotated[Sgd, tag(Sgd)]
    | Annotated[Adam, tag(Adam)]
    | Annotated[AdamW, tag(AdamW)]
    | Annotated[RmsProp, tag(RmsProp)]
    | Annotated[Adagrad, tag(Adagrad)]
    | Annotated[Lamb, tag(Lamb)]
    | Annotated[Lion, tag(Lion)]
    | Annotated[Muon, tag(Muon)]
    | Annotated[Nadam, tag(Nadam)]
    | Annotated[Radam, tag(Radam)]
    | Annotated[CustomOptimizer, tag(CustomOptimizer)]
)
_Orders = (
    Annotated[SequentialOrder, tag(SequentialOrder)]
    | Annotated[ShuffledOrder, tag(ShuffledOrder)]
    | Annotated[WeightedOrder, tag(WeightedOrder)]
    | Annotated[BalancedOrder, tag(BalancedOrder)]
    | Annotated[RepeatedOrder, tag(RepeatedOrder)]
    | Annotated[ByLengthOrder, tag(ByLengthOrder)]
    | Annotated[CallableOrder, tag(CallableOrder)]
)
OPTIMIZERS = names_of(_Optimizers)
OPTIMIZERS_WITH_DEFAULTS = names_of(_Optimizers, without_required=True)
"""Optimizers that a bare name selects, with all defaults."""
Optimizer = Annotated[
    _Optimizers,
    ExpectedText("a name, such as adam, or {name: ..., lr: ...}"),
    Discriminator(branch_of),
    BeforeValidator(named_choice("an optimizer", OPTIMIZERS, None, "custom")),
]
ORDERS_WITH_DEFAULTS = names_of(_Orders, without_required=True)
"""Orders that a bare name selects, with all defaults."""
Order = Annotated[
    _Orders,
    Discriminator(branch_of),
    BeforeValidator(named_choice("an order", names_of(_Orders), None, "call")),
    BeforeValidator(as_call),
]


class Scaling(SpecModel):
    """Scaling of the learning rate with the global batch size; the spec's rate is for `base_batch_size`."""

    rule: Literal["none", "linear", "sqrt"] = Field(
        default="none",
        description="Factor on the rate: none, global batch / base_batch_size (linear), or its root.",
    )
    base_batch_size: Count | None = Field(
        default=None, description="Global batch in samples that the spec's rate is for."
    )

    @classmethod
    def rules(cls, fields: Mapping[str, Any]) -> Iterator[Problem]:
        """Requires `base_batch_size` for rules that scale."""
        if fields.get("rule") in ("linear", "sqrt") and fields.get("base_batch_size") is None:
            yield Problem("the global batch that lr is for, in samples", ("base_batch_size",))

    def factor(self, global_batch_size: int) -> float:
        """Factor on the spec's learning rate for a global batch size in samples."""
        if self.rule == "none" or self.base_batch_size is None:
            return 1.0
        ratio = global_batch_size / self.base_batch_size
        return ratio if self.rule == "linear" else math.sqrt(ratio)


class Clip(SpecModel, json_schema_extra=one_of_schema(("value", "norm", "global_norm"))):
    """Clipping of the mean gradient of the global batch; exactly one of the fields."""

    value: Positive | None = Field(default=None, description="Bound on the size of each element.")
    norm: Positive | None = Field(default=None, description="Bound on the L2 norm of each tensor.")
    global_norm: Positive | None = Field(
        default=None, description="Bound on the L2 norm of all tensors together."
    )

    @classmethod
    def rules(cls, fields: Mapping[str, Any]) -> Iterator[Problem]:
        """Requires exactly one kind of clipping."""
        yield from exactly_one(fields, "value", "norm", "global_norm")


class LossScale(SpecModel):
    """Dynamic loss scaling for float16."""

    initial: Positive = Field(default=2.0**15, description="First scale of the loss.")
    growth_steps: Count = Field(
        default=2000, description="Steps without overflow after which the scale doubles."
    )


class _WeightAverage(SpecModel):
    every: Count = Field(
        default=1, description="Interval in steps of the weights that are averaged."
    )
    start: CountOrZero = Field(
        default=0, description="Steps before the average begins, as a copy of the weights."
    )


class Ema(_WeightAverage):
    """Exponential moving average of the weights."""

    decay: Decay = Field(
        default=0.999,
        description="Factor of the average in each update; that of the weights is the rest.",
    )

    def weight(self, count: int) -> float:
        """Weight of the next weights in an average of `count` weights."""
        return 1 - self.decay


class Profile(SpecModel):
    """Profiling of some steps by the framework's profiler."""

    first_step: CountOrZero = Field(
        default=10, description="First step to profile, from 0 over the run."
    )
    steps: Count = Field(default=10, description="Number of steps to profile.")
    all_processes: Switch = Field(
        default=False, description="Whether each process is profiled, and not rank 0 alone."
    )


class Swa(_WeightAverage):
    """Stochastic weight averaging: the equal-weight mean of the weights."""

    start: Count = Field(description="Steps before the average begins, as a copy of the weights.")

    def weight(self, count: int) -> float:
        """Weight of the next weights in an average of `count` weights."""
        return 1 / (count + 1)


class Elastic(SpecModel):
    """Training that goes on without a restart when processes are lost or join."""

    min: Count = Field(
        description="Smallest number of replicas that train; the run fails when it cannot have so many."
    )
    max: Count | None = Field(
        default=None,
        description="Largest number of replicas, up to which `isotrain join` adds some; null: that of the "
        "start.",
    )
    replacements: CountOrZero = Field(
        default=3,
        description="Number of processes that may be started in place of lost ones, over the run.",
    )

    @classmethod
    def rules(cls, fields: Mapping[str, Any]) -> Iterator[Problem]:
        """The largest number is at least the smallest."""
        least, most = fields.get("min"), fields.get("max")
        if isinstance(least, int) and isinstance(most, int) and most < least:
            yield Problem(f"at least {least}, as min", ("max",), most)


class Reproducible(SpecModel):
    """Results that are equal to the bit for any number of replicas."""

    granularity: Count = Field(
        default=8,
        description="Parts of a global batch, a power of two: the largest number of replicas.",
    )

    @classmethod
    def rules(cls, fields: Mapping[str, Any]) -> Iterator[Problem]:
        """Refuses numbers of parts that are no power of two."""
        parts = fields.get("granularity", 1)
        if isinstance(parts, int) and parts > 0 and parts & (parts - 1):
            yield Problem("a power of two", ("granularity",), parts)


class Shares(SpecModel):
    """Shares of the replicas in each global batch, by their measured speed."""

    every: Count = Field(
        default=20,
        description="Steps whose median speed decides the shares of those that follow.",
    )


class Evaluation(SpecModel):
    """Evaluation: intervals and batch size."""

    every_epochs: CountOrZero = Field(default=1, description="Interval in epochs; 0 for never.")
    every_steps: Count | None = Field(
        default=None, description="Interval in steps, besides that in epochs; null for none."
    )
    at_start: Switch = Field(
        default=False, description="Whether to evaluate before the first step, too."
    )
    batch: Count | None = Field(
        default=None,
        description="Samples per evaluation step over all replicas; null: the global batch.",
    )

    def is_due(self, steps_done: int, epochs_done: int | None, *, is_done: bool) -> bool:
        """Whether to evaluate after a step.

        Args:
            steps_done: Number of steps done.
            epochs_done: Number of epochs done, if the step was the last of one; else None.
            is_done: Whether the step was the last of the run.
        """
        if is_done and (self.every_epochs or self.every_steps):
            return True
        if self.every_epochs and epochs_done is not None and epochs_done % self.every_epochs == 0:
            return True
        return self.every_steps is not None and steps_done % self.every_steps == 0


class LoaderOptions(SpecModel):
    """Worker processes that make samples ahead of the steps that need them."""

    workers: CountOrZero | None = Field(
        default=None,
        description="Worker processes on each host, divided among its processes, which get one at least; 0: "
        "each process makes its samples itself, between steps; null: in a background thread, or as the "
        "data's DataLoader has it. With a number, `random`, `numpy.random` and torch are seeded for each "
        "sample.",
    )
    prefetch: Annotated[int, Field(strict=True, ge=1, le=16)] = Field(
        default=2,
        description="Local batches that each worker, or the thread, makes ahead; 1 to 16.",
    )
    start: Literal["spawn", "fork"] = Field(
        default="spawn",
        description="Whether workers are new interpreters, to which the data set is pickled, or forks.",
    )


def keeps_options(choice: StrategyChoice, current_name: Any) -> bool:
    """Whether a choice is the bare name of the current strategy, so that its options stay."""
    return choice.name == current_name and not choice.options


class StrategyChoice(SpecModel):
    """The strategy by which replicas cooperate."""

    name: Text = Field(default="data-parallel", description="Name of a registered strategy.")
    options: Options = Field(default={}, description="Options of that strategy.")

    @classmethod
    def of(cls, strategy: StrategyLike) -> Self:
        """Choice of a strategy's name, or of a table of name and options.

        Raises:
            SpecError: The table has other fields.
        """
        if isinstance(strategy, cls):
            return strategy
        return cls(**({"name": strategy} if isinstance(strategy, str) else dict(strategy)))

    @property
    def label(self) -> str:
        """The choice in command-line form: `NAME[,OPTION=VALUE...]`."""
        options = (
            f"{name}={value if isinstance(value, str) else json.dumps(value, default=str)}"
            for name, value in self.options.items()
        )
        return ",".join([self.name, *options])


StrategyLike = StrategyChoice | Mapping[str, Any] | str


def strategy_list(
    strategies: StrategyLike | Sequence[StrategyLike] | None,
) -> Sequence[StrategyLike] | None:
    """List of one or several strategies."""
    return [strategies] if isinstance(strategies, StrategyChoice | Mapping | str) else strategies


class LoggerChoice(SpecModel):
    """A logger and its options."""

    name: Text = Field(description="Name of a registered logger.")
    options: Options = Field(default={}, description="Options of that logger.")


class Timeouts(SpecModel):
    """Timeouts in seconds, after which a process counts as lost."""

    silence: Positive = Field(default=10.0, description="Seconds without a heartbeat.")
    start: Positive = Field(
        default=300.0,
        description="Seconds that loading the data, building the model and joining the others may take each.",
    )
    progress: Positive = Field(default=300.0, description="Seconds in one call.")
