"""The training spec: what to train, frozen and validated once."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Discriminator,
    Field,
    Tag,
    ValidationInfo,
    WithJsonSchema,
)
from pydantic_core import PydanticCustomError

from isotrain.core import references
from isotrain.core.errors import SpecError, unknown_name
from isotrain.core.spec_errors import (
    BRANCH,
    Problem,
    SpecModel,
    Words,
    as_python_number,
    at_most_one,
    exactly_one,
    raise_all,
    unknown_choice,
)

_REFERENCE = {
    "type": "string",
    "pattern": "^.+:[^:]+$",
    "description": f"An import reference: {references.SYNTAX}.",
}
_PER_FRAMEWORK = {"type": "object", "minProperties": 1, "propertyNames": {"not": {"const": "name"}}}
_COMPONENT = {
    "anyOf": [
        {"type": "string", "minLength": 1},
        {"type": "object", "required": ["name"], "properties": {"name": {"type": "string"}}},
    ]
}

Positive = Annotated[float, Field(strict=True, gt=0, allow_inf_nan=False)]
NotNegative = Annotated[float, Field(strict=True, ge=0, allow_inf_nan=False)]
Fraction = Annotated[float, Field(strict=True, ge=0, le=1, allow_inf_nan=False)]
Decay = Annotated[float, Field(strict=True, ge=0, lt=1, allow_inf_nan=False)]
Count = Annotated[int, Field(strict=True, ge=1)]
CountOrZero = Annotated[int, Field(strict=True, ge=0)]
Switch = Annotated[bool, Field(strict=True)]
Text = Annotated[str, Field(strict=True)]
Options = dict[Text, Any]
FolderName = Annotated[
    str,
    Field(strict=True, pattern=r"^[A-Za-z0-9_][A-Za-z0-9._-]{0,99}$"),
    Words("1 to 100 letters, digits and . _ - that start with a letter, a digit or _"),
]


@dataclass(frozen=True)
class Component:
    """A loss or a metric: a Keras name, an import reference or a callable, with options.

    Attributes:
        name: What it is; a text with a colon is an import reference.
        options: Keyword arguments: of the constructor for a Keras name, of each call otherwise.
    """

    name: Any
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def is_reference(self) -> bool:
        """Whether `name` is a callable or names one to import, rather than a Keras name."""
        return not isinstance(self.name, str) or ":" in self.name

    @property
    def label(self) -> str:
        """The name to print."""
        return references.describe(self.name)


def _reference(value: Any, info: ValidationInfo) -> Any:
    """Checks a callable or an import reference; file references become absolute."""
    if isinstance(value, str):
        return _reference_text(value, info)
    if not callable(value):
        raise Problem(f"{references.SYNTAX} or a callable", received=value).error()
    return value


def _reference_text(value: str, info: ValidationInfo) -> str:
    context = info.context or {}
    form = references.syntax_problem(value)
    if form is not None:
        raise Problem(references.SYNTAX, received=value).error()
    found = references.absolute(value, context.get("folder") or Path.cwd())
    wrong = references.problem(found) if context.get("check_imports") else None
    if wrong is not None:
        raise Problem("an import path that exists", received=value, hint=wrong).error()
    return found


def _data(value: Any, info: ValidationInfo) -> Any:
    if isinstance(value, str):
        return _reference_text(value, info)
    if value is None or _is_plain(value):
        raise Problem(f"{references.SYNTAX} or a data source", received=value).error()
    return value


def _is_plain(value: Any) -> bool:
    """Whether a value is made of nothing but what a text file can hold."""
    if isinstance(value, Mapping):
        return all(_is_plain(part) for part in value.values())
    if isinstance(value, list | tuple):
        return all(_is_plain(part) for part in value)
    return value is None or isinstance(value, str | int | float)


def _component(value: Any, info: ValidationInfo) -> Component:
    if isinstance(value, Component):
        return _component({"name": value.name, **value.options}, info)
    if isinstance(value, Mapping):
        if "name" not in value:
            raise Problem("a name", ("name",)).error()
        options = {key: as_python_number(option) for key, option in value.items() if key != "name"}
        return Component(_component(value["name"], info).name, options)
    if isinstance(value, str) and value and ":" not in value:
        return Component(value)
    if not (isinstance(value, str) or callable(value)) or value == "":
        expected = "a name, an import reference, a callable or {name: ..., option: ...}"
        raise Problem(expected, received=value).error()
    return Component(_reference(value, info))


def _each(
    values: Mapping[Any, Any], one: Callable[[Any, ValidationInfo], Any], info: ValidationInfo
) -> dict[Any, Any]:
    """Validates every value, and reports the problems of all of them at their keys."""
    good: dict[Any, Any] = {}
    problems: list[Problem] = []
    for key, value in values.items():
        try:
            good[key] = one(value, info)
        except PydanticCustomError as error:
            problems.append(Problem.of(error).below(key))
    raise_all("values", problems, values)
    return good


def _per_framework(one: Callable[[Any, ValidationInfo], Any]) -> Callable[..., Any]:
    def validate(value: Any, info: ValidationInfo) -> Any:
        if not isinstance(value, Mapping) or "name" in value:
            return one(value, info)
        if not value or not all(isinstance(name, str) and name for name in value):
            raise Problem("a table {framework: ...} with a name each", received=value).error()
        return _each(value, one, info)

    return validate


def _metrics(value: Any, info: ValidationInfo) -> tuple[Component, ...]:
    if not isinstance(value, list | tuple):
        raise Problem("a list of metrics", received=value).error()
    return tuple(_each(dict(enumerate(value)), _component, info).values())


Reference = Annotated[Any, AfterValidator(_reference), WithJsonSchema(_REFERENCE)]
References = Annotated[
    Any,
    AfterValidator(_per_framework(_reference)),
    WithJsonSchema({"anyOf": [_REFERENCE, {**_PER_FRAMEWORK, "additionalProperties": _REFERENCE}]}),
]
Data = Annotated[Any, AfterValidator(_data), WithJsonSchema(_REFERENCE)]
Components = Annotated[
    Any,
    AfterValidator(_per_framework(_component)),
    WithJsonSchema({"anyOf": [_COMPONENT, {**_PER_FRAMEWORK, "additionalProperties": _COMPONENT}]}),
]
Metrics = Annotated[
    Any, AfterValidator(_metrics), WithJsonSchema({"type": "array", "items": _COMPONENT})
]


def _require_name(schema: dict[str, Any]) -> None:
    schema["required"] = ["name", *schema.get("required", [])]


def _one_of_schema(*groups: tuple[str, ...]) -> dict[str, Any]:
    """JSON Schema for: of each group, exactly one field is given and is not null."""

    def given(name: str) -> dict[str, Any]:
        return {"required": [name], "properties": {name: {"not": {"type": "null"}}}}

    return {"allOf": [{"oneOf": [given(name) for name in group]} for group in groups]}


class _Optimizer(SpecModel, json_schema_extra=_require_name):
    lr: Positive = Field(description="Learning rate (of `scaling.base_batch` when that is given).")
    weight_decay: NotNegative = Field(
        default=0.0, description="Decoupled weight decay: lr * weight_decay * weight is subtracted."
    )


class Sgd(_Optimizer):
    """Stochastic gradient descent."""

    name: Literal["sgd"] = "sgd"
    momentum: Decay = Field(default=0.0, description="Momentum; 0 turns it off.")
    nesterov: Switch = Field(default=False, description="Nesterov's momentum.")

    @classmethod
    def rules(cls, fields: Mapping[str, Any]) -> Iterator[Problem]:
        """Nesterov's form needs a momentum."""
        if fields.get("nesterov") is True and fields.get("momentum", 0) == 0:
            yield Problem("a momentum > 0 with nesterov", ("momentum",), fields.get("momentum", 0))


class _AdamLike(_Optimizer):
    beta_1: Decay = Field(default=0.9, description="Decay of the mean of the gradients.")
    beta_2: Decay = Field(default=0.999, description="Decay of the mean of the squared gradients.")
    epsilon: Positive = Field(default=1e-7, description="Added to the denominator.")


class Adam(_AdamLike):
    """Adam."""

    name: Literal["adam"] = "adam"
    lr: Positive = Field(default=1e-3, description="Learning rate.")
    amsgrad: Switch = Field(default=False, description="The AMSGrad variant.")


class AdamW(Adam):
    """Adam with decoupled weight decay."""

    name: Literal["adamw"] = "adamw"  # type: ignore[assignment]
    weight_decay: NotNegative = Field(default=4e-3, description="Decoupled weight decay.")


class Lamb(_AdamLike):
    """Lamb: Adam with a rate per layer, for large batches."""

    name: Literal["lamb"] = "lamb"


class RmsProp(_Optimizer):
    """RMSprop."""

    name: Literal["rmsprop"] = "rmsprop"
    rho: Decay = Field(default=0.9, description="Decay of the mean of the squared gradients.")
    momentum: Decay = Field(default=0.0, description="Momentum; 0 turns it off.")
    epsilon: Positive = Field(default=1e-7, description="Added to the denominator.")
    centered: Switch = Field(default=False, description="Normalise by the estimated variance.")


class Adagrad(_Optimizer):
    """Adagrad."""

    name: Literal["adagrad"] = "adagrad"
    initial_accumulator_value: NotNegative = Field(
        default=0.1, description="Start of the squared sums."
    )
    epsilon: Positive = Field(default=1e-7, description="Added to the denominator.")


class CustomOptimizer(SpecModel):
    """A native optimizer that a callable of yours builds."""

    name: ClassVar[str] = "custom"
    custom: References = Field(
        description="Callable that builds a native optimizer, or one per framework."
    )
    lr: Positive = Field(description="Learning rate (of `scaling.base_batch` when that is given).")
    args: Options = Field(default={}, description="Keyword arguments of the callable.")


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
    _require_name(schema)
    schema.update(_one_of_schema(("every_epochs", "every_steps")))


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


class _DecaySchedule(_Schedule, json_schema_extra=_require_name):
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


_OPTIMIZERS: dict[str, type[SpecModel]] = {
    "sgd": Sgd,
    "adam": Adam,
    "adamw": AdamW,
    "rmsprop": RmsProp,
    "adagrad": Adagrad,
    "lamb": Lamb,
    "custom": CustomOptimizer,
}
_SCHEDULES: dict[str, type[SpecModel]] = {
    "constant": ConstantSchedule,
    "step": StepSchedule,
    "cosine": CosineSchedule,
    "polynomial": PolynomialSchedule,
}
OPTIMIZERS = tuple(name for name in _OPTIMIZERS if name != "custom")
SCHEDULES = tuple(_SCHEDULES)


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


Optimizer = Annotated[
    Annotated[Sgd, Tag(f"{BRANCH}sgd")]
    | Annotated[Adam, Tag(f"{BRANCH}adam")]
    | Annotated[AdamW, Tag(f"{BRANCH}adamw")]
    | Annotated[RmsProp, Tag(f"{BRANCH}rmsprop")]
    | Annotated[Adagrad, Tag(f"{BRANCH}adagrad")]
    | Annotated[Lamb, Tag(f"{BRANCH}lamb")]
    | Annotated[CustomOptimizer, Tag(f"{BRANCH}custom")],
    Discriminator(_branch),
    BeforeValidator(_named("an optimizer", OPTIMIZERS, None)),
]
Schedule = Annotated[
    Annotated[ConstantSchedule, Tag(f"{BRANCH}constant")]
    | Annotated[StepSchedule, Tag(f"{BRANCH}step")]
    | Annotated[CosineSchedule, Tag(f"{BRANCH}cosine")]
    | Annotated[PolynomialSchedule, Tag(f"{BRANCH}polynomial")],
    Discriminator(_branch),
    BeforeValidator(_named("a schedule", SCHEDULES, "constant")),
]


class Scaling(SpecModel):
    """How the rate follows the global batch: the spec's rate is for `base_batch`."""

    rule: Literal["none", "linear", "sqrt"] = Field(
        default="none",
        description="Factor on the rate: none, global batch / base_batch (linear), or its root.",
    )
    base_batch: Count | None = Field(
        default=None, description="Global batch in samples that the spec's rate is for."
    )

    @classmethod
    def rules(cls, fields: Mapping[str, Any]) -> Iterator[Problem]:
        """A rule that scales needs the batch it scales from."""
        if fields.get("rule") in ("linear", "sqrt") and fields.get("base_batch") is None:
            yield Problem("the global batch that lr is for, in samples", ("base_batch",))

    def factor(self, global_batch: int) -> float:
        """What the spec's rate is multiplied by for a global batch of so many samples."""
        if self.rule == "none" or self.base_batch is None:
            return 1.0
        ratio = global_batch / self.base_batch
        return ratio if self.rule == "linear" else math.sqrt(ratio)


class Clip(SpecModel, json_schema_extra=_one_of_schema(("value", "norm", "global_norm"))):
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


class StrategyChoice(SpecModel):
    """The strategy by which replicas cooperate."""

    name: Text = Field(default="data-parallel", description="Name of a registered strategy.")
    options: Options = Field(default={}, description="Options of that strategy.")


class Timeouts(SpecModel):
    """When a process counts as lost, in seconds."""

    silence: Positive = Field(default=10.0, description="Seconds without a heartbeat.")
    start: Positive = Field(default=60.0, description="Seconds until every process has started.")
    progress: Positive = Field(default=300.0, description="Seconds in one call.")


def _strategy(value: Any) -> Any:
    return {"name": value} if isinstance(value, str) else value


def _scaling(value: Any) -> Any:
    return {"rule": value} if isinstance(value, str) else value


class TrainingSpec(
    SpecModel,
    json_schema_extra=_one_of_schema(
        ("loss", "objective"), ("global_batch", "local_batch"), ("epochs", "steps")
    ),
):
    """What to train: the same under every backend."""

    if TYPE_CHECKING:  # every field also takes its form in a file, such as optimizer="adam"

        def __init__(self, **fields: Any) -> None: ...

    name: FolderName = Field(
        default="run",
        description="Name of the run, also of its folder: letters, digits and . _ - only.",
    )
    model: References = Field(
        description="Callable that builds the model, or a table {framework: callable}."
    )
    model_args: Options = Field(default={}, description="Keyword arguments of the model callable.")
    data: Data = Field(description="Callable that gives the data, or from Python the data itself.")
    data_args: Options = Field(default={}, description="Keyword arguments of the data callable.")
    transform: Reference | None = Field(
        default=None,
        description="Callable (batch, random) -> batch, applied to training batches only.",
    )
    loss: Components | None = Field(
        default=None,
        description="Loss: a Keras name, an import reference, {name: ..., option: ...}, or a "
        "table {framework: loss}; not with objective.",
    )
    objective: References | None = Field(
        default=None,
        description="Callable (model, batch) -> one loss per sample, or a table {framework: "
        "callable}; instead of loss.",
    )
    metrics: Metrics = Field(
        default=(),
        description="Metrics: Keras names, import references or {name: ..., option: ...}.",
    )
    optimizer: Optimizer = Field(
        description="Optimizer: {name: ..., lr: ...}, a bare name for all defaults, or "
        "{custom: reference, lr: ..., args: {...}}."
    )
    schedule: Schedule = Field(
        default=ConstantSchedule(),
        description="How the rate changes during the run, and its warm-up.",
    )
    scaling: Annotated[Scaling, BeforeValidator(_scaling)] = Field(
        default=Scaling(), description="How the rate follows the global batch."
    )
    clip: Clip | None = Field(default=None, description="Gradient clipping; null for none.")
    global_batch: Count | None = Field(
        default=None, description="Samples per step over all replicas; not with local_batch."
    )
    local_batch: Count | None = Field(
        default=None, description="Samples per step of one replica; not with global_batch."
    )
    epochs: Count | None = Field(default=None, description="Passes over the data; not with steps.")
    steps: Count | None = Field(default=None, description="Optimizer steps; not with epochs.")
    accumulate: Count = Field(
        default=1, description="Micro-batches whose gradients make up one step."
    )
    shuffle: Switch = Field(
        default=True, description="Whether each epoch has its own order of samples."
    )
    drop_remainder: Switch = Field(
        default=False, description="Whether the last, smaller global batch of an epoch is left out."
    )
    seed: Annotated[int, Field(strict=True, ge=0, lt=2**32)] = Field(
        default=0, description="Seed of the weights, the order and the transform; 0 to 2**32 - 1."
    )
    precision: Literal["float32", "float64", "bfloat16", "float16"] = Field(
        default="float32",
        description="Number type; bfloat16 and float16 keep the weights in float32.",
    )
    loss_scale: LossScale | None = Field(
        default=None, description="Loss scaling, for float16 only; null for the defaults."
    )
    evaluation: Evaluation = Field(default=Evaluation(), description="When and how to evaluate.")
    device: Literal["auto", "cpu", "gpu"] = Field(
        default="auto", description="Kind of device to use."
    )
    threads: Count | None = Field(
        default=None, description="CPU threads per replica; null: the cores shared equally."
    )
    strategy: Annotated[StrategyChoice, BeforeValidator(_strategy)] = Field(
        default=StrategyChoice(), description="How replicas cooperate: a name, or {name, options}."
    )
    backend_options: dict[Text, Options] = Field(
        default={}, description="Options of backends, by backend name; each backend checks its own."
    )
    timeouts: Timeouts = Field(default=Timeouts(), description="When a process counts as lost.")

    @classmethod
    def rules(cls, fields: Mapping[str, Any]) -> Iterator[Problem]:
        """The pairs of which exactly one is given, and the loss scale's precision."""
        yield from exactly_one(fields, "loss", "objective")
        yield from exactly_one(fields, "global_batch", "local_batch")
        yield from exactly_one(fields, "epochs", "steps")
        precision = fields.get("precision", "float32")
        if fields.get("loss_scale") is not None and precision != "float16":
            hint = "leave loss_scale out"
            yield Problem("precision float16 with loss_scale", ("precision",), precision, hint)

    @property
    def loss_scaling(self) -> LossScale | None:
        """The loss scale in force: null unless the precision is float16."""
        return (self.loss_scale or LossScale()) if self.precision == "float16" else None

    def resolve_global_batch(self, replicas: int) -> int:
        """The samples of one step over so many replicas."""
        if self.global_batch is not None:
            return self.global_batch
        assert self.local_batch is not None
        return self.local_batch * replicas

    def for_framework(self, field_name: str, framework: str) -> Any:
        """The value of `model`, `loss` or `objective` for one framework.

        Raises:
            SpecError: The field is a table that has no entry for the framework.
        """
        value = getattr(self, field_name)
        if not isinstance(value, Mapping):
            return value
        if framework not in value:
            raise SpecError(f"{field_name}: {unknown_name('framework', framework, value)}")
        return value[framework]

    def replace(self, **changes: Any) -> Self:
        """A copy with some fields changed, validated as a whole.

        Raises:
            SpecError: The changed spec is wrong.
        """
        given = {name: getattr(self, name) for name in self.model_fields_set}
        return type(self)(**{**given, **changes})

    def to_dict(self) -> dict[str, Any]:
        """The whole spec as plain JSON values; callables and objects are described by name."""
        fields = jsonable(self)
        assert isinstance(fields, dict)
        return fields

    def digest(self) -> str:
        """SHA-256, in hexadecimal, of the canonical JSON of the spec.

        A callable counts by its name and an object by its type (and shape), not by content.
        """
        text = json.dumps(self.to_dict(), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()


def jsonable(value: Any) -> Any:
    """A value of the spec in the form it has in a file; what no file can hold is described."""
    value = as_python_number(value)
    if isinstance(value, SpecModel):
        names = sorted(type(value).model_fields, key=lambda name: name != "name")
        return {name: jsonable(getattr(value, name)) for name in names}
    if isinstance(value, Component):
        name = references.describe(value.name)
        return {"name": name, **jsonable(value.options)} if value.options else name
    if isinstance(value, Mapping):
        return {str(key): jsonable(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [jsonable(part) for part in value]
    if isinstance(value, float) and not math.isfinite(value):
        return repr(value)
    if value is None or isinstance(value, str | int | float):
        return value
    return references.describe(value)
