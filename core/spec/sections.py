"""The parts of the spec: schedules, clipping and the like, and what chooses an optimizer."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Annotated, Any, Literal, Self, get_args

from pydantic import (
    BeforeValidator,
    Discriminator,
    Field,
    Tag,
)

from isotrain.core.spec.field_types import (
    Count,
    CountOrZero,
    Fraction,
    Options,
    Positive,
    Text,
    one_of_schema,
    require_name,
)
from isotrain.core.spec.optimizers import (
    Adagrad,
    Adam,
    AdamW,
    CustomOptimizer,
    Lamb,
    RmsProp,
    Sgd,
)
from isotrain.core.spec.validation import (
    BRANCH,
    Problem,
    SpecModel,
    at_most_one,
    exactly_one,
    unknown_choice,
)


class _Schedule(SpecModel):
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
        """The warm-up is counted in one unit."""
        yield from at_most_one(fields, "warmup_steps", "warmup_epochs")


class ConstantSchedule(_Schedule):
    """The same rate throughout, after the warm-up."""

    name: Literal["constant"] = "constant"


def _step_schema(schema: dict[str, Any]) -> None:
    require_name(schema)
    schema.update(one_of_schema(("every_epochs", "every_steps")))


class StepSchedule(_Schedule, json_schema_extra=_step_schema):
    """The rate is multiplied by a factor at regular intervals."""

    name: Literal["step"] = "step"
    every_epochs: Count | None = Field(default=None, description="Interval in epochs.")
    every_steps: Count | None = Field(default=None, description="Interval in steps.")
    factor: Positive = Field(description="What the rate is multiplied by each time.")

    @classmethod
    def rules(cls, fields: Mapping[str, Any]) -> Iterator[Problem]:
        """The interval is given once."""
        yield from super().rules(fields)
        yield from exactly_one(fields, "every_epochs", "every_steps")


class _DecaySchedule(_Schedule, json_schema_extra=require_name):
    final_fraction: Fraction = Field(default=0.0, description="Fraction of the rate at the end.")
    decay_steps: Count | None = Field(
        default=None, description="Steps of the decay after the warm-up; null for the whole run."
    )


class CosineSchedule(_DecaySchedule):
    """The rate falls along half a cosine."""

    name: Literal["cosine"] = "cosine"


class PolynomialSchedule(_DecaySchedule):
    """The rate falls along a power of the remaining fraction of the run."""

    name: Literal["polynomial"] = "polynomial"
    power: Positive = Field(default=1.0, description="Exponent; 1 is a straight line.")


def _tag(kind: type[SpecModel]) -> Tag:
    """By which one of several forms is told: its name."""
    return Tag(f"{BRANCH}{getattr(kind, 'name', None) or kind.model_fields['name'].default}")


def _names(forms: Any, *, alone: bool = False) -> tuple[str, ...]:
    """The names of those among several forms that are chosen by one; `alone`: that need nothing else."""
    kinds = [get_args(each)[0].model_fields for each in get_args(forms)]
    return tuple(
        fields["name"].default
        for fields in kinds
        if "name" in fields and not (alone and any(f.is_required() for f in fields.values()))
    )


def _named(kind: str, names: tuple[str, ...], default: str | None) -> Callable[[Any], Any]:
    """Accepts a bare name for {name: ...} and settles which of `names` is meant."""

    def validate(value: Any) -> Any:
        if isinstance(value, SpecModel):
            return value
        fields = {"name": value} if isinstance(value, str) else value
        if not isinstance(fields, Mapping):
            raise Problem(f"the name of {kind} or {{name: ..., ...}}", received=value).error()
        name = fields.get("name", default)
        if name is None and "custom" in fields:
            return fields
        if name is None:
            raise Problem(f"one of {', '.join(names)}", ("name",)).error()
        if name not in names:
            raise unknown_choice(name, names, ("name",)).error()
        return {**fields, "name": name}

    return validate


def _branch(value: Any) -> str:
    if isinstance(value, Mapping):
        return f"{BRANCH}{value.get('name', 'custom')}"
    return f"{BRANCH}{getattr(value, 'name', '')}"


_Optimizers = (
    Annotated[Sgd, _tag(Sgd)]
    | Annotated[Adam, _tag(Adam)]
    | Annotated[AdamW, _tag(AdamW)]
    | Annotated[RmsProp, _tag(RmsProp)]
    | Annotated[Adagrad, _tag(Adagrad)]
    | Annotated[Lamb, _tag(Lamb)]
    | Annotated[CustomOptimizer, _tag(CustomOptimizer)]
)
_Schedules = (
    Annotated[ConstantSchedule, _tag(ConstantSchedule)]
    | Annotated[StepSchedule, _tag(StepSchedule)]
    | Annotated[CosineSchedule, _tag(CosineSchedule)]
    | Annotated[PolynomialSchedule, _tag(PolynomialSchedule)]
)
OPTIMIZERS = _names(_Optimizers)
SCHEDULES = _names(_Schedules)
OPTIMIZERS_ALONE = _names(_Optimizers, alone=True)
"""Those that a bare name chooses."""
SCHEDULES_ALONE = _names(_Schedules, alone=True)
Optimizer = Annotated[
    _Optimizers,
    Discriminator(_branch),
    BeforeValidator(_named("an optimizer", OPTIMIZERS, None)),
]
Schedule = Annotated[
    _Schedules,
    Discriminator(_branch),
    BeforeValidator(_named("a schedule", SCHEDULES, "constant")),
]


class Scaling(SpecModel):
    """How the rate follows the global batch: the spec's rate is for `base_batch_size`."""

    rule: Literal["none", "linear", "sqrt"] = Field(
        default="none",
        description="Factor on the rate: none, global batch / base_batch_size (linear), or its root.",
    )
    base_batch_size: Count | None = Field(
        default=None, description="Global batch in samples that the spec's rate is for."
    )

    @classmethod
    def rules(cls, fields: Mapping[str, Any]) -> Iterator[Problem]:
        """A rule that scales needs the batch it scales from."""
        if fields.get("rule") in ("linear", "sqrt") and fields.get("base_batch_size") is None:
            yield Problem("the global batch that lr is for, in samples", ("base_batch_size",))

    def factor(self, global_batch_size: int) -> float:
        """What the spec's rate is multiplied by for a global batch of so many samples."""
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
        """One kind of clipping."""
        yield from exactly_one(fields, "value", "norm", "global_norm")


class LossScale(SpecModel):
    """Dynamic loss scaling for float16."""

    initial: Positive = Field(default=2.0**15, description="First scale of the loss.")
    growth_steps: Count = Field(
        default=2000, description="Steps without overflow after which the scale doubles."
    )


class Evaluation(SpecModel):
    """When and how the model is evaluated."""

    every_epochs: CountOrZero = Field(default=1, description="Interval in epochs; 0 for never.")
    batch: Count | None = Field(
        default=None,
        description="Samples per evaluation step over all replicas; null: the global batch.",
    )


def keeps_own(choice: StrategyChoice, own: Any) -> bool:
    """Whether a choice only names the strategy that there is, whose own options then stay."""
    return choice.name == own and not choice.options


class StrategyChoice(SpecModel):
    """The strategy by which replicas cooperate."""

    name: Text = Field(default="data-parallel", description="Name of a registered strategy.")
    options: Options = Field(default={}, description="Options of that strategy.")

    @classmethod
    def of(cls, given: StrategyLike) -> Self:
        """The choice that a name, or a table of name and options, stands for.

        Raises:
            SpecError: The table has another form.
        """
        if isinstance(given, cls):
            return given
        return cls(**({"name": given} if isinstance(given, str) else dict(given)))

    @property
    def label(self) -> str:
        """The form it has on the command line: `NAME[,OPTION=VALUE...]`."""
        options = (
            f"{name}={value if isinstance(value, str) else json.dumps(value, default=str)}"
            for name, value in self.options.items()
        )
        return ",".join([self.name, *options])


StrategyLike = StrategyChoice | Mapping[str, Any] | str


class LoggerChoice(SpecModel):
    """A logger that writes down how the run goes."""

    name: Text = Field(description="Name of a registered logger.")
    options: Options = Field(default={}, description="Options of that logger.")


class Timeouts(SpecModel):
    """When a process counts as lost, in seconds."""

    silence: Positive = Field(default=10.0, description="Seconds without a heartbeat.")
    start: Positive = Field(
        default=300.0,
        description="Seconds that loading the data, building the model and joining the others may take each.",
    )
    progress: Positive = Field(default=300.0, description="Seconds in one call.")
