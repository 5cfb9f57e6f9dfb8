"""The training spec: what to train, frozen and validated once."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

from pydantic import (
    BeforeValidator,
    Field,
)

from isotrain.core.errors import SpecError, unknown_name
from isotrain.core.spec import import_strings
from isotrain.core.spec.checkpoint_policy import CheckpointPolicy, EarlyStopping, watched
from isotrain.core.spec.field_types import (
    Codes,
    Component,
    Count,
    Data,
    FolderName,
    Losses,
    Metrics,
    Model,
    NotNegative,
    Number,
    Options,
    Plugins,
    Reference,
    References,
    Switch,
    Text,
    one_of_schema,
)
from isotrain.core.spec.initial_weights import InitialWeights, Patterns, matches
from isotrain.core.spec.sections import (
    Clip,
    ConstantSchedule,
    Evaluation,
    LoggerChoice,
    LossScale,
    Optimizer,
    Scaling,
    Schedule,
    StrategyChoice,
    StrategyLike,
    Timeouts,
    keeps_own,
)
from isotrain.core.spec.validation import (
    Problem,
    SpecModel,
    Words,
    as_python_number,
    exactly_one,
)

_LOGGERS = Words("a list of logger names, or of {name: ..., options: {...}}")


def _strategy(value: Any) -> Any:
    return {"name": value} if isinstance(value, str) else value


def _loggers(value: Any) -> Any:
    """Accepts one logger for a list of it, and a bare name for {name: ...}."""
    listed = [value] if isinstance(value, str | Mapping) else value
    if not isinstance(listed, list | tuple):
        return listed
    return [{"name": each} if isinstance(each, str) else each for each in listed]


def _initial_weights(value: Any) -> Any:
    is_whole = value is None or isinstance(value, Mapping | InitialWeights)
    return value if is_whole else {"source": value}


def _scaling(value: Any) -> Any:
    return {"rule": value} if isinstance(value, str) else value


def _none(value: Any) -> Any:
    return () if value is None else value


class TrainingSpec(
    SpecModel,
    json_schema_extra=one_of_schema(
        ("loss", "objective"), ("global_batch_size", "local_batch_size"), ("epochs", "steps")
    ),
):
    """What to train: the same under every backend."""

    if TYPE_CHECKING:  # every field also takes its form in a file, such as optimizer="adam"

        def __init__(self, **fields: Any) -> None: ...

    name: FolderName = Field(
        default="run",
        description="Name of the run, also of its folder: letters, digits and . _ - only.",
    )
    model: Model = Field(
        description="Callable that builds the model, a table {framework: callable}, or the name of a "
        "model that a plugin registers."
    )
    model_args: Options = Field(default={}, description="Keyword arguments of the model callable.")
    data: Data = Field(description="Callable that gives the data, or from Python the data itself.")
    data_args: Options = Field(default={}, description="Keyword arguments of the data callable.")
    validation_split: Annotated[float, Field(strict=True, gt=0, lt=1)] | None = Field(
        default=None,
        description="How much of the training data, from its end, to validate on; null where the data "
        "have a validation part, or for none.",
    )
    transform: Reference | None = Field(
        default=None,
        description="Callable (inputs, targets, random) -> (inputs, targets), on training data only.",
    )
    initial_weights: Annotated[InitialWeights | None, BeforeValidator(_initial_weights)] = Field(
        default=None,
        description="What the weights start as in place of what the model makes: a file, a run, a checkpoint "
        "or a callable, or {source: ..., include: ..., exclude: ..., map: ..., freeze: ...}.",
    )
    loss: Losses | None = Field(
        default=None,
        description="Loss: a Keras name, an import reference, {name: ..., option: ...}, or a "
        "table {framework: loss} or {output: loss}; not with objective.",
    )
    loss_weights: dict[Text, Number] | None = Field(
        default=None,
        description="By which the losses of several outputs are multiplied in their sum: {output: number}.",
    )
    class_weight: dict[int, NotNegative] | None = Field(
        default=None,
        description="By which the loss of training samples is multiplied: {class: number}; others count 1.",
    )
    objective: References | None = Field(
        default=None,
        description="Callable (model, (inputs, targets)) -> one loss per sample, or their mean, or the "
        "pair (losses, predictions); or a table {framework: callable}; instead of loss.",
    )
    metrics: Metrics = Field(
        default=(),
        description="Metrics: Keras names, import references or {name: ..., option: ...}; of several outputs "
        "a table {output: metrics}.",
    )
    optimizer: Optimizer = Field(
        description="Optimizer: {name: ..., lr: ...}, a bare name for all defaults (sgd has none for lr), or "
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
    global_batch_size: Count | None = Field(
        default=None, description="Samples per step over all replicas; not with local_batch_size."
    )
    local_batch_size: Count | None = Field(
        default=None, description="Samples per step of one replica; not with global_batch_size."
    )
    epochs: Count | None = Field(default=None, description="Passes over the data; not with steps.")
    steps: Count | None = Field(default=None, description="Optimizer steps; not with epochs.")
    gradient_accumulation_steps: Count = Field(
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
    capture: Switch = Field(
        default=True,
        description="Whether steps of a portable model on torch are replayed from a record of what Keras "
        "does, where that is possible; false: Keras' own Python computes every step.",
    )
    recompute: Annotated[Patterns, BeforeValidator(_none)] = Field(
        default=(),
        description="Patterns of the names of layers whose results are computed again in the backward pass "
        "rather than kept, such as block_*; * for every layer; null for none.",
    )
    compile: Switch = Field(
        default=False,
        description="Whether the framework's compiler translates the model: the first steps take longer, "
        "later ones often less, and all round otherwise.",
    )
    evaluation: Evaluation = Field(default=Evaluation(), description="When and how to evaluate.")
    checkpoint: CheckpointPolicy | None = Field(
        default=None, description="When checkpoints are saved, and which are kept; null for none."
    )
    early_stopping: Annotated[EarlyStopping | None, BeforeValidator(watched)] = Field(
        default=None,
        description="Ends training when a metric, or {metric, mode, patience, min_delta}, gets no better; "
        "null: it never does.",
    )
    min_replicas: Count | None = Field(
        default=None,
        description="With how few replicas a run may go on after failures; null: with all it had.",
    )
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
    plugins: Plugins = Field(
        default=(),
        description="Plugins that this spec needs: modules, and files that end in .py.",
    )
    loggers: Annotated[tuple[LoggerChoice, ...], BeforeValidator(_loggers), _LOGGERS] = Field(
        default=(),
        description="What writes down how the run goes: names, or {name: ..., options: {...}}.",
    )
    on_nan: Literal["stop", "warn", "ignore"] = Field(
        default="stop", description="What to do when a loss is NaN: not a number."
    )
    timeouts: Timeouts = Field(default=Timeouts(), description="When a process counts as lost.")
    ignore: Codes = Field(
        default=(),
        description="Codes that `isotrain check` leaves out, such as ISO101, or ISO4 for a group; no run is"
        " refused for them.",
    )

    @classmethod
    def rules(cls, fields: Mapping[str, Any]) -> Iterator[Problem]:
        """The pairs of which exactly one is given, and what does not go with each other."""
        yield from exactly_one(fields, "loss", "objective")
        if fields.get("loss_weights") is not None and not isinstance(fields.get("loss"), Mapping):
            hint = "for a single loss there is nothing to weigh"
            yield Problem("loss as a table {output: loss}", ("loss_weights",), None, hint)
        yield from exactly_one(fields, "global_batch_size", "local_batch_size")
        yield from exactly_one(fields, "epochs", "steps")
        if fields.get("min_replicas") is not None and fields.get("local_batch_size") is not None:
            hint = "with fewer replicas the global batch stays the same; local_batch_size makes it smaller"
            least = fields["min_replicas"]
            yield Problem("global_batch_size with min_replicas", ("min_replicas",), least, hint)
        if fields.get("compile") and fields.get("recompute"):
            hint = "the compiler itself decides what it keeps"
            yield Problem("no recompute with compile", ("recompute",), fields["recompute"], hint)
        precision = fields.get("precision", "float32")
        if fields.get("loss_scale") is not None and precision != "float16":
            hint = "leave loss_scale out"
            yield Problem("precision float16 with loss_scale", ("precision",), precision, hint)

    def silences(self, code: str) -> bool:
        """Whether `ignore` has a code, or the group that it is in."""
        return any(code.startswith(given) for given in self.ignore)

    @property
    def loss_scaling(self) -> LossScale | None:
        """The loss scale in force: null unless the precision is float16."""
        return (self.loss_scale or LossScale()) if self.precision == "float16" else None

    def is_frozen(self, name: str) -> bool:
        """Whether the weight of a name stays as it is; no adapter trains or moves it."""
        return self.initial_weights is not None and matches(name, self.initial_weights.freeze)

    def recomputed(self, names: Collection[str], separator: str) -> list[str]:
        """The layers that are computed again in the backward pass, but for those inside of such layers.

        Args:
            names: Of a model's layers; what is inside of a layer is called by that layer's name first.
            separator: Between the name of a layer and that of what is inside.

        Raises:
            SpecError: A pattern fits no name.
        """
        for pattern in self.recompute:
            if not any(matches(name, (pattern,)) for name in names):
                raise SpecError(
                    f"recompute: {pattern!r} fits none of the model's layers, which are"
                    f" {', '.join(names) or 'none'}."
                )
        found = [name for name in names if matches(name, self.recompute)]
        starts = tuple(f"{name}{separator}" for name in found)
        return [name for name in found if not name.startswith(starts)]

    def resolve_global_batch_size(self, replicas: int) -> int:
        """The samples of one step over so many replicas."""
        if self.global_batch_size is not None:
            return self.global_batch_size
        assert self.local_batch_size is not None
        return self.local_batch_size * replicas

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

    def losses(self, framework: str) -> dict[str | None, Component]:
        """The losses for one framework, by the output of the model that they are of; None for what it gives.

        A table is one by framework where it has the name of this one, or of one that has a model; else it is
        one by output.

        Raises:
            SpecError: There is none for the framework; or `loss_weights` has other names.
        """
        given = self.loss
        if isinstance(given, Mapping):
            models = self.model if isinstance(self.model, Mapping) else ()
            by_framework = bool({framework, *models} & set(given))
            given = self.for_framework("loss", framework) if by_framework else given
        losses = given if isinstance(given, Mapping) else {} if given is None else {None: given}
        if self.loss_weights is not None and set(self.loss_weights) != set(losses):
            raise SpecError(
                f"loss_weights: given for {', '.join(self.loss_weights)}; expected one for each output of"
                f" loss: {', '.join(map(str, losses))}."
            )
        return dict(losses)

    def replace(self, **changes: Any) -> Self:
        """A copy with some fields changed, validated as a whole.

        Raises:
            SpecError: The changed spec is wrong.
        """
        given = {name: getattr(self, name) for name in self.model_fields_set}
        return type(self)(**{**given, **changes})

    def under(self, strategy: StrategyLike) -> Self:
        """The same under a strategy; its own strategy's bare name keeps its own options.

        Raises:
            SpecError: The strategy is given in a wrong form.
        """
        choice = StrategyChoice.of(strategy)
        return self if keeps_own(choice, self.strategy.name) else self.replace(strategy=choice)

    def to_dict(self) -> dict[str, Any]:
        """The whole spec as plain JSON values; callables and objects are described by name."""
        fields = jsonable(self)
        assert isinstance(fields, dict)
        return fields


def jsonable(value: Any) -> Any:
    """A value of the spec in the form it has in a file; what no file can hold is described."""
    value = as_python_number(value)
    if isinstance(value, SpecModel):
        names = sorted(type(value).model_fields, key=lambda name: name != "name")
        return {name: jsonable(getattr(value, name)) for name in names}
    if isinstance(value, Component):
        fields = jsonable(value.fields)
        return fields["name"] if len(fields) == 1 else fields
    if isinstance(value, Mapping):
        return {str(key): jsonable(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [jsonable(part) for part in value]
    if isinstance(value, float) and not math.isfinite(value):
        return repr(value)
    if value is None or isinstance(value, str | int | float):
        return value
    return import_strings.describe(value)
