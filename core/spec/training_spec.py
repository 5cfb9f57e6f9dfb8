"""The training spec: model, data, loss, optimizer and the rest, frozen and validated once."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

from pydantic import (
    BeforeValidator,
    Field,
)

from isotrain.core.errors import SpecError, first_of, unknown_name
from isotrain.core.spec import import_strings, short_forms
from isotrain.core.spec.checkpoint_policy import CheckpointPolicy, EarlyStopping
from isotrain.core.spec.collate import Collate
from isotrain.core.spec.field_combinations import combination_problems
from isotrain.core.spec.field_types import (
    Callbacks,
    Codes,
    Component,
    Count,
    CountOrZero,
    Data,
    FolderName,
    FrozenModelSource,
    Losses,
    Metrics,
    Model,
    ModelCall,
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
from isotrain.core.spec.orders import SequentialOrder
from isotrain.core.spec.schedules import ConstantSchedule, PlateauSchedule, Schedule
from isotrain.core.spec.sections import (
    Clip,
    Elastic,
    Ema,
    Evaluation,
    LoaderOptions,
    LoggerChoice,
    LossScale,
    Optimizer,
    Order,
    Profile,
    Reproducible,
    Scaling,
    Shares,
    StrategyChoice,
    StrategyLike,
    Swa,
    Timeouts,
    keeps_options,
)
from isotrain.core.spec.step_values import StepValue
from isotrain.core.spec.validation import (
    ExpectedText,
    Problem,
    SpecModel,
    as_python_number,
    at_most_one,
)

_MAX_LAYERS = 20
"""Number of layers that an error names."""
_GHOST_BATCHES = 8
"""Default of `ghost_batches`."""
_SHARES = ExpectedText("by-speed, {every: 20} or null")
_LOGGERS = ExpectedText("a list of logger names, or of {name: ..., options: {...}}")


def _loggers(value: Any) -> Any:
    """Accepts a single logger for a list of one, and a bare name for `{name: NAME}`."""
    loggers = [value] if isinstance(value, str | Mapping) else value
    if not isinstance(loggers, list | tuple):
        return loggers
    return [short_forms.NAME(each) for each in loggers]


def _null_as_empty(value: Any) -> Any:
    return () if value is None else value


def _shuffle(fields: Mapping[str, Any]) -> bool:
    """Default of `shuffle`, by the order."""
    return not isinstance(fields.get("order"), SequentialOrder)


class Update(SpecModel):
    """One of several updates of each batch: which weights change, by which objective and optimizer.

    Fields that are left out are those of the spec.
    """

    objective: References | None = Field(
        default=None,
        description="Objective of this update, in place of the spec's loss or objective.",
    )
    loss: Losses | None = Field(
        default=None, description="Loss of this update, in place of the spec's loss or objective."
    )
    metrics: Metrics | None = Field(
        default=None, description="Metrics of this update's predictions; null for the spec's."
    )
    weights: Patterns = Field(
        default=("*",), description="Patterns of the names of the weights that this update changes."
    )
    optimizer: Optimizer | None = Field(
        default=None, description="Optimizer of this update; null for the spec's."
    )
    schedule: Schedule | None = Field(
        default=None, description="Schedule of this update's rate; null for the spec's."
    )
    clip: Clip | None = Field(
        default=None, description="Clipping of this update's gradients; null for the spec's."
    )
    every: Count = Field(
        default=1, description="Interval in steps: 5 is in steps 4, 9, 14, ... of the run."
    )
    from_epoch: CountOrZero = Field(
        default=0, description="First epoch, from 0, in which this update takes part."
    )

    @classmethod
    def rules(cls, fields: Mapping[str, Any]) -> Iterator[Problem]:
        """Refuses both a loss and an objective."""
        yield from at_most_one(fields, "loss", "objective")

    def is_due(self, step: int, epoch: int) -> bool:
        """Whether this update takes part in a step of the run, from 0, of an epoch."""
        return epoch >= self.from_epoch and step % self.every == self.every - 1


def _first_optimizer(fields: Mapping[str, Any]) -> Any:
    """Optimizer of the first update, for a spec without one of its own."""
    updates = fields.get("updates") or {}
    return next((update.optimizer for update in updates.values()), None)


_UPDATE_FIELDS = ("metrics", "optimizer", "schedule", "clip")


def _require_one_of_each(schema: dict[str, Any]) -> None:
    """Adds the required fields to the JSON Schema: updates may each have a loss in place of the spec's."""
    losses, updates, *others = one_of_schema(
        ("loss", "objective"),
        ("updates",),
        ("global_batch_size", "local_batch_size"),
        ("epochs", "steps"),
    )["allOf"]
    without_loss = {**updates["oneOf"][0], "not": {"anyOf": losses["oneOf"]}}
    schema["allOf"] = [{"oneOf": [*losses["oneOf"], without_loss]}, *others]


class TrainingSpec(SpecModel, json_schema_extra=_require_one_of_each):
    """Training spec: what to train and how, equal under every backend."""

    if TYPE_CHECKING:  # fields also accept their form in spec files, such as optimizer="adam"

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
    call: ModelCall | None = Field(
        default=None,
        description="How the model is called: keywords, for model(**inputs); a callable (model, inputs) -> "
        "predictions; or a table {framework: callable}; null for model(inputs).",
    )
    data: Data | None = Field(
        default=None,
        description="Callable that gives the data, or from Python the data itself; null with steps, for "
        "loops that make their batches.",
    )
    data_args: Options = Field(default={}, description="Keyword arguments of the data callable.")
    validation_split: Annotated[float, Field(strict=True, gt=0, lt=1)] | None = Field(
        default=None,
        description="Fraction of the training data, from its end, to validate on; null where the data "
        "have a validation part, or for none.",
    )
    collate: Collate | None = Field(
        default=None,
        description="How batches are made of single samples, after the global batch is cut: {pad: {part: "
        "number}, to: longest}, or a callable (samples) -> batch; null: samples are stacked.",
    )
    transform: Reference | None = Field(
        default=None,
        description="Callable (inputs, targets, random) -> (inputs, targets), on training data only.",
    )
    initial_weights: Annotated[
        InitialWeights | None, BeforeValidator(short_forms.initial_weights)
    ] = Field(
        default=None,
        description="Initial weights in place of the model's own: a file, a run, a checkpoint or a "
        "callable, or {source: ..., include: ..., exclude: ..., map: ..., freeze: ...}.",
    )
    loss: Losses | None = Field(
        default=None,
        description="Loss: a Keras name, an import reference, {name: ..., option: ...}, or a "
        "table {framework: loss} or {output: loss}; not with objective.",
    )
    loss_weights: dict[Text, Number] | None = Field(
        default=None,
        description="Factors of the losses of several outputs in their sum: {output: number}.",
    )
    class_weight: dict[int, NotNegative] | None = Field(
        default=None,
        description="Factors of the loss of training samples: {class: number}; other classes have 1.",
    )
    objective: References | None = Field(
        default=None,
        description="Callable (model, (inputs, targets)) or (model, (inputs, targets), step) -> losses, or "
        "the pair (losses, predictions); or a table {framework: callable}; instead of loss.",
    )
    values: dict[Text, StepValue] = Field(
        default={},
        description="Scalars that the objective gets as `step.values`: {name: number}, {name: {name: linear, "
        "start: ..., end: ..., steps: ...}} or {name: callable of the step}.",
    )
    frozen: dict[Text, FrozenModelSource] = Field(
        default={},
        description="Frozen models that the objective gets as `step.frozen`: {name: callable that builds "
        "it}, or a table {framework: callable} or the directory of a run for each.",
    )
    metrics: Metrics = Field(
        default=(),
        description="Metrics: Keras names, import references or {name: ..., option: ...}; of several outputs "
        "a table {output: metrics}.",
    )
    metrics_over_all: dict[Text, Reference] = Field(
        default={},
        description="Metrics of all samples of an evaluation at once: {name: callable (targets, predictions) "
        "-> number, array or dict}, of NumPy arrays; or a class of Keras' metrics or torchmetrics'.",
    )
    updates: dict[Text, Update] | None = Field(
        default=None,
        description="Named updates that each batch does in this order, of a model whose parts have "
        "objectives or optimizers of their own: {name: {objective: ..., weights: ..., optimizer: ...}}.",
    )
    optimizer: Optimizer = Field(
        default_factory=_first_optimizer,
        description="Optimizer: {name: ..., lr: ...}, a bare name for all defaults (sgd has none for lr), or "
        "{custom: reference, lr: ..., args: {...}}; not needed where each of updates has one.",
    )
    schedule: Schedule = Field(
        default=ConstantSchedule(),
        description="How the rate changes during the run, and its warm-up: a name, {name: ..., ...}, or a "
        "callable from the step to the fraction of the rate.",
    )
    scaling: Annotated[Scaling, BeforeValidator(short_forms.RULE)] = Field(
        default=Scaling(), description="How the rate follows the global batch."
    )
    gradients: References | None = Field(
        default=None,
        description="Callable (names, gradients) or (names, gradients, weights) -> gradients, of the mean "
        "gradients of each step, before they are clipped; or a table {framework: callable}.",
    )
    clip: Clip | None = Field(default=None, description="Gradient clipping; null for none.")
    gradient_norm: Annotated[
        Switch | Annotated[dict[Text, Patterns], Field(min_length=1)] | None,
        ExpectedText("true, false, null or {name: patterns of weights}"),
    ] = Field(
        default=None,
        description="Whether to record the L2 norm of all gradients of each step, before clipping, as "
        "the scalar gradient_norm; with {name: patterns}, also those of these weights, as "
        "gradient_norm_{name}. Null: where clip.global_norm computes it anyway.",
    )
    ema: Annotated[Ema | None, BeforeValidator(short_forms.DECAY)] = Field(
        default=None,
        description="Exponential moving average of the weights, which is evaluated and kept: a decay, or "
        "{decay, every, start}; null for none.",
    )
    swa: Swa | None = Field(
        default=None,
        description="Equal-weight mean of the weights (stochastic weight averaging), which is evaluated and "
        "kept: {start, every}; not with ema.",
    )
    per_replica: Annotated[Patterns, BeforeValidator(_null_as_empty)] = Field(
        default=(),
        description="Patterns of the names of non-trainable state that each replica keeps for itself, such "
        "as *hidden; null for none.",
    )
    batch_norm: Literal["local", "global", "ghost"] = Field(
        default="local",
        description="Samples over which batch normalizations train: local (those of each replica), global "
        "(those of the global batch), or ghost (those of each ghost batch, equal parts of the global batch).",
    )
    ghost_batches: Count | None = Field(
        default=None,
        description="Ghost batches of a global batch, with batch_norm: ghost: the largest number of "
        "replicas; null: the granularity of reproducible, or 8.",
    )
    random_layers: Literal["per-replica", "per-sample"] = Field(
        default="per-replica",
        description="How dropout and other random layers draw: per-replica (each replica its own numbers), "
        "or per-sample (the same numbers for a sample on any number of replicas and any framework).",
    )
    global_batch_size: Count | None = Field(
        default=None, description="Samples per step over all replicas; not with local_batch_size."
    )
    local_batch_size: Count | None = Field(
        default=None, description="Samples per step of one replica; not with global_batch_size."
    )
    epochs: Count | None = Field(default=None, description="Passes over the data; not with steps.")
    steps: Count | None = Field(default=None, description="Optimizer steps; not with epochs.")
    epoch_steps: Count | None = Field(
        default=None,
        description="Global batches that count as an epoch, whatever the number of samples; null for a "
        "pass over the data.",
    )
    gradient_accumulation_steps: Count = Field(
        default=1, description="Micro-batches whose gradients make up one step."
    )
    reproducible: Annotated[Reproducible | None, BeforeValidator(short_forms.BITS)] = Field(
        default=None,
        description="Whether results are equal to the bit for any number of replicas: bits, or {granularity: "
        "8}, the parts of a global batch that are micro-batches; null: they are equal to rounding.",
    )
    shares: Annotated[Shares | None, BeforeValidator(short_forms.BY_SPEED), _SHARES] = Field(
        default=None,
        description="How many parts of a global batch, with reproducible, each replica computes: by-speed, "
        "or {every: 20}, the steps after which they are dealt anew; null: equally many.",
    )
    drop_outliers: Annotated[float, Field(strict=True, gt=1, allow_inf_nan=False)] | None = Field(
        default=None,
        description="Norm of the gradients of a part of a global batch, with reproducible, in medians of all "
        "parts, beyond which it is left out of the step, as is a part that is not finite; null: none is.",
    )
    verify_every: Count | None = Field(
        default=None,
        description="Steps after which every replica computes the same part of a global batch, with "
        "reproducible, and their bits are compared; null: never.",
    )
    order: Order | None = Field(
        default=None,
        description="Order of the samples: a name, {name: ..., ...}, or a callable (seed, epoch, length,"
        " columns) -> positions; null: as shuffle says.",
    )
    shuffle: Switch = Field(
        default_factory=_shuffle,
        description="Whether each epoch has its own order of samples; default true, or false with the order"
        " sequential.",
    )
    drop_remainder: Switch = Field(
        default=False, description="Whether the last, smaller global batch of an epoch is left out."
    )
    loader: LoaderOptions = Field(
        default=LoaderOptions(), description="Worker processes that make the samples."
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
        description="Whether steps of a portable model on torch are captured once and replayed, where "
        "possible; false: Keras' own Python computes every step.",
    )
    recompute: Annotated[Patterns, BeforeValidator(_null_as_empty)] = Field(
        default=(),
        description="Patterns of the names of layers whose activations are recomputed in the backward pass "
        "(activation checkpointing), such as block_*; * for every layer; null for none.",
    )
    compile: Switch = Field(
        default=False,
        description="Whether the framework's compiler compiles the model: the first steps take longer, "
        "later ones often less, and results are rounded differently.",
    )
    evaluation: Evaluation = Field(default=Evaluation(), description="When and how to evaluate.")
    checkpoint: CheckpointPolicy | None = Field(
        default=None, description="When checkpoints are saved, and which are kept; null for none."
    )
    early_stopping: Annotated[EarlyStopping | None, BeforeValidator(short_forms.METRIC)] = Field(
        default=None,
        description="Early stopping: a metric, or {metric, mode, patience, min_delta}; null for none.",
    )
    min_replicas: Count | None = Field(
        default=None,
        description="Smallest number of replicas with which a run may continue after failures; null: it "
        "needs them all.",
    )
    elastic: Elastic | None = Field(
        default=None,
        description="Whether the other replicas go on when a process is lost, and others join: "
        "{min: 2, max: 8, replacements: 3}; null: the run fails.",
    )
    device: Literal["auto", "cpu", "gpu"] = Field(
        default="auto", description="Kind of device to use."
    )
    threads: Count | None = Field(
        default=None, description="CPU threads per replica; null: the cores shared equally."
    )
    strategy: Annotated[StrategyChoice, BeforeValidator(short_forms.NAME)] = Field(
        default=StrategyChoice(), description="How replicas cooperate: a name, or {name, options}."
    )
    backend: Text | None = Field(
        default=None,
        description="Backend, NAME or NAME:COLLECTIVE, where none is named elsewhere; null: the first that is"
        " available.",
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
        description="Loggers: names, or {name: ..., options: {...}}.",
    )
    callbacks: Callbacks = Field(
        default=(),
        description="Callbacks of `isotrain.run` in each training process: references to objects, or to "
        "callables that make them, with any of the methods on_start, on_step, on_evaluation, on_epoch, "
        "on_checkpoint and on_end.",
    )
    profile: Annotated[Profile | None, BeforeValidator(short_forms.switch)] = Field(
        default=None,
        description="Steps that the framework's profiler traces: true, or {first_step, steps, "
        "all_processes}; null for none.",
    )
    on_nan: Literal["stop", "warn", "ignore", "skip"] = Field(
        default="stop",
        description="What to do when a loss is NaN; skip: leave out steps whose loss or gradients are not "
        "finite.",
    )
    timeouts: Timeouts = Field(default=Timeouts(), description="When a process counts as lost.")
    ignore: Codes = Field(
        default=(),
        description="Codes that `isotrain check` leaves out, such as ISO101, or ISO4 for a group; no run is"
        " refused for them.",
    )

    @classmethod
    def rules(cls, fields: Mapping[str, Any]) -> Iterator[Problem]:
        """Validates pairs of which exactly one is required, and combinations that are not supported."""
        return combination_problems(fields, cls.model_fields["optimizer"])

    @property
    def parts(self) -> int | None:
        """Parts of a global batch whatever the number of replicas (`reproducible`); None without it."""
        return None if self.reproducible is None else self.reproducible.granularity

    @property
    def dealt_parts(self) -> int | None:
        """Parts of a global batch of which each replica gets whole ones; None: it gets an equal share."""
        if self.batch_norm != "ghost" or self.parts is not None:
            return self.parts
        return self.ghost_batches or _GHOST_BATCHES

    @property
    def weight_average(self) -> Ema | Swa | None:
        """Average of the weights over steps: `ema` or `swa`; None for neither."""
        return self.ema or self.swa

    def silences(self, code: str) -> bool:
        """Whether `ignore` has a code of `isotrain check`, or its group."""
        return any(code.startswith(ignored) for ignored in self.ignore)

    @property
    def loss_scaling(self) -> LossScale | None:
        """Loss scaling to use: for float16 the field or its defaults, else None."""
        return (self.loss_scale or LossScale()) if self.precision == "float16" else None

    def is_frozen(self, name: str) -> bool:
        """Whether the weight of a name is frozen: neither trained nor updated by forward passes."""
        return self.initial_weights is not None and matches(name, self.initial_weights.freeze)

    def for_update(self, name: str) -> Self:
        """The spec of one of the named updates: its fields in place of this spec's, and no updates.

        Raises:
            SpecError: There is no update of that name.
        """
        updates = self.updates or {}
        if name not in updates:
            raise SpecError(unknown_name("update", name, updates))
        update = updates[name]
        fields = {each: getattr(update, each) for each in _UPDATE_FIELDS}
        changes = {each: value for each, value in fields.items() if value is not None}
        if update.loss is not None or update.objective is not None:
            changes |= {"loss": update.loss, "objective": update.objective}
        return self.model_copy(update={**changes, "updates": None})

    @property
    def gradient_norm_parts(self) -> dict[str, tuple[str, ...]]:
        """Patterns of the weights of each norm that `gradient_norm` names, by its name."""
        return self.gradient_norm if isinstance(self.gradient_norm, dict) else {}

    @property
    def update_specs(self) -> dict[str, Self]:
        """The specs of the named updates by name; without updates this spec, under an empty name."""
        return (
            {name: self.for_update(name) for name in self.updates} if self.updates else {"": self}
        )

    @property
    def monitored_metrics(self) -> list[str]:
        """Metrics of epochs that `checkpoint.keep_best`, `early_stopping` and plateau schedules look at."""
        schedules = [each.schedule for each in self.update_specs.values()]
        plateaus = [each for each in schedules if isinstance(each, PlateauSchedule)]
        keep_best = self.checkpoint.keep_best if self.checkpoint else None
        return [each.metric for each in (keep_best, self.early_stopping, *plateaus) if each]

    def weights_by_update(self, names: Collection[str]) -> dict[str, list[str]]:
        """Names of the weights that each update changes, by the name of the update.

        Args:
            names: Names of the model's trainable weights.

        Raises:
            SpecError: A pattern of an update fits none of them.
        """
        for update, section in (self.updates or {}).items():
            for pattern in section.weights:
                if not any(matches(name, (pattern,)) for name in names):
                    raise SpecError(
                        f"updates.{update}.weights: {pattern!r} fits none of the model's trainable weights,"
                        f" which are {first_of([*names], _MAX_LAYERS) or 'none'}."
                    )
        return {
            update: [name for name in names if matches(name, section.weights)]
            for update, section in (self.updates or {}).items()
        }

    def per_replica_names(self, trainable: Collection[str], others: Collection[str]) -> list[str]:
        """Names of the non-trainable state that each replica keeps for itself.

        Args:
            trainable: Names of the model's trainable weights.
            others: Names of its other weights and buffers.

        Raises:
            SpecError: A pattern fits a trainable weight, or nothing.
        """
        for pattern in self.per_replica:
            if trained := [name for name in trainable if matches(name, (pattern,))]:
                raise SpecError(
                    f"per_replica: {pattern!r} fits trainable weights, which replicas update alike:"
                    f" {first_of(trained, _MAX_LAYERS)}. Name non-trainable state only."
                )
            if not any(matches(name, (pattern,)) for name in others):
                raise SpecError(
                    f"per_replica: {pattern!r} fits none of the model's non-trainable state, which is"
                    f" {first_of([*others], _MAX_LAYERS) or 'empty'}."
                )
        return [name for name in others if matches(name, self.per_replica)]

    def recomputed(self, names: Collection[str], separator: str) -> list[str]:
        """Names of the layers to recompute in the backward pass, without layers nested in such layers.

        Args:
            names: Names of the model's layers; nested layers have the outer layer's name as prefix.
            separator: Separator between the names of an outer and a nested layer.

        Raises:
            SpecError: A pattern matches no layer.
        """
        for pattern in self.recompute:
            if not any(matches(name, (pattern,)) for name in names):
                raise SpecError(
                    f"recompute: {pattern!r} fits none of the model's layers, which are"
                    f" {first_of([*names], _MAX_LAYERS) or 'none'}."
                )
        selected = [name for name in names if matches(name, self.recompute)]
        prefixes = tuple(f"{name}{separator}" for name in selected)
        return [name for name in selected if not name.startswith(prefixes)]

    def resolve_global_batch_size(self, replicas: int) -> int:
        """Samples per step over this number of replicas."""
        if self.global_batch_size is not None:
            return self.global_batch_size
        assert self.local_batch_size is not None
        return self.local_batch_size * replicas

    def for_framework(self, field_name: str, framework: str) -> Any:
        """Value of a field such as `model`, `loss` or `objective` for one framework.

        Raises:
            SpecError: The field is a table without an entry for the framework.
        """
        value = getattr(self, field_name)
        if not isinstance(value, Mapping):
            return value
        if framework not in value:
            raise SpecError(f"{field_name}: {unknown_name('framework', framework, value)}")
        return value[framework]

    def losses(self, framework: str) -> dict[str | None, Component]:
        """Losses for one framework: model output to loss; the key None for a loss of all outputs.

        A table is by framework if it has this framework's name, or that of one with a model of its own; else
        it is by output.

        Raises:
            SpecError: There is no loss for the framework, or `loss_weights` names other outputs.
        """
        loss = self.loss
        if isinstance(loss, Mapping):
            models = self.model if isinstance(self.model, Mapping) else ()
            by_framework = bool({framework, *models} & set(loss))
            loss = self.for_framework("loss", framework) if by_framework else loss
        losses = loss if isinstance(loss, Mapping) else {} if loss is None else {None: loss}
        if self.loss_weights is not None and set(self.loss_weights) != set(losses):
            raise SpecError(
                f"loss_weights: given for {', '.join(self.loss_weights)}; expected one for each output of"
                f" loss: {', '.join(map(str, losses))}."
            )
        return dict(losses)

    def replace(self, **changes: Any) -> Self:
        """Validated copy with some fields changed.

        Raises:
            SpecError: The changed spec is invalid.
        """
        fields = {name: getattr(self, name) for name in self.model_fields_set}
        return type(self)(**{**fields, **changes})

    def with_strategy(self, strategy: StrategyLike) -> Self:
        """Copy with another strategy; the bare name of the current strategy keeps its options.

        Raises:
            SpecError: The strategy is not a name or a table of name and options.
        """
        choice = StrategyChoice.of(strategy)
        return self if keeps_options(choice, self.strategy.name) else self.replace(strategy=choice)

    def to_dict(self) -> dict[str, Any]:
        """The spec as JSON values; callables and objects are described by name."""
        fields = jsonable(self)
        assert isinstance(fields, dict)
        return fields


def jsonable(value: Any) -> Any:
    """A value of the spec in its form in a spec file; objects that no file can hold are described."""
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
