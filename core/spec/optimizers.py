"""The optimizers of the spec: options, slots and properties of each.

Slot names are those in the named state of portable models.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, BeforeValidator, Field

from isotrain.core.spec import short_forms
from isotrain.core.spec.field_types import (
    Decay,
    NotNegative,
    Options,
    Positive,
    References,
    Switch,
    require_name,
)
from isotrain.core.spec.initial_weights import Patterns
from isotrain.core.spec.schedules import PlateauSchedule, Schedule
from isotrain.core.spec.validation import ExpectedText, Problem, SpecModel


def _rate_schedule(schedule: Any) -> Any:
    """Validator that refuses schedules of more than a rate, and those that depend on metrics."""
    if isinstance(schedule, PlateauSchedule) or getattr(schedule, "momentum_range", None):
        expected = "a schedule that is a function of the step, without momentum_range"
        raise Problem(expected, received=schedule.name).error()
    return schedule


class OptimizerGroup(SpecModel):
    """Weights with options of their own; a weight belongs to the first group that matches its name."""

    weights: Patterns = Field(
        description="Patterns of the names of these weights, such as *bias; each fits a trainable weight."
    )
    lr_factor: NotNegative = Field(
        default=1.0,
        description="What the rate of the step is multiplied by; 0 stops these weights.",
    )
    schedule: Annotated[Schedule, AfterValidator(_rate_schedule)] | None = Field(
        default=None,
        description="Schedule of the rate of these weights, in place of that of the spec or update; "
        "lr_factor comes on top.",
    )
    weight_decay: NotNegative | None = Field(default=None, description="Weight decay.")
    momentum: Decay | None = Field(default=None, description="Momentum.")
    nesterov: Switch | None = Field(default=None, description="Nesterov's momentum.")
    orthogonalize: Switch | None = Field(
        default=None, description="Orthogonalize the updates of matrices."
    )
    beta_1: Decay | None = Field(default=None, description="Decay of the mean of the gradients.")
    beta_2: Decay | None = Field(
        default=None, description="Decay of the mean of the squared gradients."
    )
    rho: Decay | None = Field(
        default=None, description="Decay of the mean of the squared gradients."
    )
    epsilon: Positive | None = Field(default=None, description="Added to the denominator.")
    amsgrad: Switch | None = Field(default=None, description="The AMSGrad variant.")
    centered: Switch | None = Field(
        default=None, description="Normalise by the estimated variance."
    )
    initial_accumulator_value: NotNegative | None = Field(
        default=None, description="Start of the squared sums."
    )

    @property
    def options(self) -> dict[str, Any]:
        """Options of the optimizer that the group sets, by name."""
        return {name: value for name, value in self if name in _GROUP_OPTIONS and value is not None}


_GROUP_OPTIONS = OptimizerGroup.model_fields.keys() - {"weights", "lr_factor", "schedule"}


_SLOT_OPTIONS = ("momentum", "amsgrad", "centered")
"""Options with which an optimizer has one more slot."""


class LayerDecay(SpecModel):
    """Layer-wise decay of the learning rate: the last layer has the full rate, each one before it less."""

    factor: Annotated[float, Field(strict=True, gt=0, le=1)] = Field(
        description="Rate of a layer relative to that of the next one."
    )
    layers: Annotated[
        tuple[Patterns, ...], ExpectedText("a list of patterns, or of lists of patterns")
    ] = Field(
        default=(),
        description="Patterns of the weights of each layer, the first layer first; by default the layers "
        "are read from the names of the weights.",
    )


class _Optimizer(SpecModel, json_schema_extra=require_name):
    """Base of the built-in optimizers.

    Attributes:
        is_adaptive: Whether step sizes hardly depend on the scale of the gradients, as with Adam.
        decay_is_decoupled: Whether weight decay is decoupled in every framework, and not only in Keras.
        updates_whole_matrices: Whether an update of a weight needs all of its gradient.
    """

    is_adaptive: ClassVar[bool] = False
    decay_is_decoupled: ClassVar[bool] = False
    updates_whole_matrices: ClassVar[bool] = False
    _variants: ClassVar[tuple[str, ...]] = ()

    lr: Positive = Field(
        description="Learning rate (of `scaling.base_batch_size` when that is given)."
    )
    weight_decay: NotNegative = Field(
        default=0.0,
        description="Weight decay. Decoupled (lr * weight_decay * weight is subtracted) with Keras "
        "optimizers and adamw; torch's other native optimizers add it to the gradient.",
    )
    groups: tuple[OptimizerGroup, ...] = Field(
        default=(),
        description="Groups of weights with options of their own: [{weights: patterns, lr_factor: ..., "
        "schedule: ..., weight_decay: ..., ...}]; the first that fits holds, and all other weights have the "
        "options above.",
    )
    layer_decay: Annotated[LayerDecay | None, BeforeValidator(short_forms.FACTOR)] = Field(
        default=None,
        description="Layer-wise decay of the rate: a factor such as 0.75, or {factor: ..., layers: "
        "[patterns, ...]}; null for none.",
    )

    @classmethod
    def rules(cls, fields: Mapping[str, Any]) -> Iterator[Problem]:
        """Refuses groups with options that the optimizer lacks, and Nesterov's momentum without any."""
        groups = fields.get("groups")
        for index, group in enumerate(groups if isinstance(groups, list | tuple) else ()):
            options = group.options if isinstance(group, OptimizerGroup) else group
            if not isinstance(options, Mapping):
                continue
            given = {name for name, value in options.items() if value is not None}
            for name in given & _GROUP_OPTIONS - cls.model_fields.keys():
                yield Problem("an option of this optimizer", ("groups", index, name), options[name])
            if options.get("nesterov") and "momentum" in cls.model_fields:
                momentum = options.get("momentum")
                if momentum is None:
                    momentum = fields.get("momentum", cls.model_fields["momentum"].default)
                if not momentum:
                    expected = "a momentum > 0 with nesterov, in the group or outside of it"
                    yield Problem(expected, ("groups", index, "nesterov"), options["nesterov"])

    @property
    def slots(self) -> tuple[str, ...]:
        """Names of the optimizer state tensors of a weight's size."""
        return ()

    @property
    def slot_options_of_groups(self) -> dict[str, Any]:
        """Options that are off in the table itself, and add a slot for some group: their largest values."""
        values = {
            name: max(getattr(group, name) or 0 for group in self.groups)
            for name in _SLOT_OPTIONS
            if self.groups and not getattr(self, name, True)
        }
        return {name: value for name, value in values.items() if value}

    def _has_slot_of(self, option: str) -> bool:
        """Whether an option that adds a slot is on, for all weights or for some."""
        return bool(getattr(self, option)) or option in self.slot_options_of_groups

    @property
    def is_plain(self) -> bool:
        """Whether all options that change the update rule, such as momentum, are off."""
        variants = ("groups", "layer_decay", *self._variants)
        return not any(getattr(self, variant) for variant in variants)

    @property
    def decays_weights(self) -> bool:
        """Whether some weights have weight decay."""
        return bool(self.weight_decay) or any(group.weight_decay for group in self.groups)

    @property
    def group_schedules(self) -> dict[int, Any]:
        """Schedules of groups that have their own, by index of the group."""
        return {i: each.schedule for i, each in enumerate(self.groups) if each.schedule}


class Sgd(_Optimizer):
    """Stochastic gradient descent."""

    _variants = ("momentum", "nesterov")

    name: Literal["sgd"] = "sgd"
    momentum: Decay = Field(default=0.0, description="Momentum; 0 turns it off.")
    nesterov: Switch = Field(default=False, description="Nesterov's momentum.")

    @property
    def slots(self) -> tuple[str, ...]:
        return ("momentum",) if self._has_slot_of("momentum") else ()

    @classmethod
    def rules(cls, fields: Mapping[str, Any]) -> Iterator[Problem]:
        """Requires a momentum for Nesterov momentum."""
        yield from super().rules(fields)
        if fields.get("nesterov") is True and fields.get("momentum", 0) == 0:
            yield Problem("a momentum > 0 with nesterov", ("momentum",), fields.get("momentum", 0))


class _AdamLike(_Optimizer):
    beta_1: Decay = Field(default=0.9, description="Decay of the mean of the gradients.")
    beta_2: Decay = Field(default=0.999, description="Decay of the mean of the squared gradients.")
    epsilon: Positive = Field(default=1e-7, description="Added to the denominator.")

    @property
    def slots(self) -> tuple[str, ...]:
        return "momentum", "velocity"


class Adam(_AdamLike):
    """Adam."""

    is_adaptive = True
    _variants = ("amsgrad",)

    name: Literal["adam"] = "adam"
    lr: Positive = Field(default=1e-3, description="Learning rate.")
    amsgrad: Switch = Field(default=False, description="The AMSGrad variant.")

    @property
    def slots(self) -> tuple[str, ...]:
        return (*super().slots, *(("velocity_hat",) if self._has_slot_of("amsgrad") else ()))


class AdamW(Adam):
    """Adam with decoupled weight decay."""

    decay_is_decoupled = True

    name: Literal["adamw"] = "adamw"  # type: ignore[assignment]
    weight_decay: NotNegative = Field(default=4e-3, description="Decoupled weight decay.")


class Lamb(_AdamLike):
    """LAMB: Adam with layer-wise trust ratios, for large batches."""

    name: Literal["lamb"] = "lamb"
    lr: Positive = Field(default=1e-3, description="Learning rate.")


class Lion(_Optimizer):
    """Lion: steps of one size, in the signs of the momentum."""

    is_adaptive = True
    decay_is_decoupled = True

    name: Literal["lion"] = "lion"
    lr: Positive = Field(default=1e-3, description="Learning rate.")
    beta_1: Decay = Field(
        default=0.9, description="Weight of the momentum in the direction of a step."
    )
    beta_2: Decay = Field(default=0.99, description="Decay of the mean of the gradients.")

    @property
    def slots(self) -> tuple[str, ...]:
        return ("momentum",)


class Nadam(_AdamLike):
    """NAdam: Adam with Nesterov's momentum."""

    is_adaptive = True
    decay_is_decoupled = True

    name: Literal["nadam"] = "nadam"
    lr: Positive = Field(default=1e-3, description="Learning rate.")


class Radam(_AdamLike):
    """RAdam: Adam whose first steps are not adaptive, until the variance can be estimated."""

    is_adaptive = True
    decay_is_decoupled = True

    name: Literal["radam"] = "radam"
    lr: Positive = Field(default=1e-3, description="Learning rate.")


class Muon(_AdamLike):
    """Muon for the weights that are matrices: orthogonalized momentum. AdamW for all others."""

    is_adaptive = True
    decay_is_decoupled = True
    updates_whole_matrices = True

    name: Literal["muon"] = "muon"
    lr: Positive = Field(default=1e-3, description="Learning rate, of both.")
    momentum: Decay = Field(default=0.95, description="Momentum of matrices; 0 turns it off.")
    nesterov: Switch = Field(default=True, description="Nesterov's momentum, of matrices.")
    orthogonalize: Switch = Field(
        default=True,
        description="Orthogonalize the updates of matrices; false in `groups` gives some of them to AdamW, "
        "as it should be for embeddings and the last layer.",
    )
    beta_1: Decay = Field(default=0.9, description="AdamW's decay of the mean of the gradients.")
    beta_2: Decay = Field(
        default=0.999, description="AdamW's decay of the mean of the squared gradients."
    )


class RmsProp(_Optimizer):
    """RMSprop."""

    is_adaptive = True
    _variants = ("momentum", "centered")

    name: Literal["rmsprop"] = "rmsprop"
    lr: Positive = Field(default=1e-3, description="Learning rate.")
    rho: Decay = Field(default=0.9, description="Decay of the mean of the squared gradients.")
    momentum: Decay = Field(default=0.0, description="Momentum; 0 turns it off.")
    epsilon: Positive = Field(default=1e-7, description="Added to the denominator.")
    centered: Switch = Field(default=False, description="Normalise by the estimated variance.")

    @property
    def slots(self) -> tuple[str, ...]:
        momentum = ("momentum",) if self._has_slot_of("momentum") else ()
        centered = ("average_gradient",) if self._has_slot_of("centered") else ()
        return ("velocity", *momentum, *centered)


class Adagrad(_Optimizer):
    """Adagrad."""

    name: Literal["adagrad"] = "adagrad"
    lr: Positive = Field(default=1e-3, description="Learning rate.")
    initial_accumulator_value: NotNegative = Field(
        default=0.1, description="Start of the squared sums."
    )
    epsilon: Positive = Field(default=1e-7, description="Added to the denominator.")

    @property
    def slots(self) -> tuple[str, ...]:
        return ("accumulator",)


class CustomOptimizer(SpecModel):
    """Custom optimizer, built by your own callable; isotrain knows nothing of its update rule."""

    is_adaptive: ClassVar[bool] = False
    decay_is_decoupled: ClassVar[bool] = False
    updates_whole_matrices: ClassVar[bool] = False
    is_plain: ClassVar[bool] = False
    slots: ClassVar[tuple[str, ...]] = ()
    weight_decay: ClassVar[float] = 0.0
    decays_weights: ClassVar[bool] = False
    groups: ClassVar[tuple[OptimizerGroup, ...]] = ()
    group_schedules: ClassVar[Mapping[int, Any]] = {}
    layer_decay: ClassVar[LayerDecay | None] = None
    name: ClassVar[str] = "custom"
    custom: References = Field(
        description="Callable that builds an optimizer, or one per framework: for a torch module "
        "(parameters, lr, **args) -> a torch optimizer, else (lr, **args) -> a Keras optimizer. A parameter "
        "`names` receives the names of the weights."
    )
    lr: Positive = Field(
        description="Learning rate (of `scaling.base_batch_size` when that is given)."
    )
    args: Options = Field(default={}, description="Keyword arguments of the callable.")
