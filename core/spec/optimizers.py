"""The optimizers of the spec: options, slots and properties of each.

Slot names are those in the named state of portable models.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, ClassVar, Literal

from pydantic import Field

from isotrain.core.spec.field_types import (
    Decay,
    NotNegative,
    Options,
    Positive,
    References,
    Switch,
    require_name,
)
from isotrain.core.spec.validation import Problem, SpecModel


class _Optimizer(SpecModel, json_schema_extra=require_name):
    """Base of the built-in optimizers.

    Attributes:
        is_adaptive: Whether step sizes hardly depend on the scale of the gradients, as with Adam.
        decay_is_decoupled: Whether weight decay is decoupled in every framework, and not only in Keras.
    """

    is_adaptive: ClassVar[bool] = False
    decay_is_decoupled: ClassVar[bool] = False
    _variants: ClassVar[tuple[str, ...]] = ()

    lr: Positive = Field(
        description="Learning rate (of `scaling.base_batch_size` when that is given)."
    )
    weight_decay: NotNegative = Field(
        default=0.0,
        description="Weight decay. Decoupled (lr * weight_decay * weight is subtracted) with Keras "
        "optimizers and adamw; torch's other native optimizers add it to the gradient.",
    )

    @property
    def slots(self) -> tuple[str, ...]:
        """Names of the optimizer state tensors of a weight's size."""
        return ()

    @property
    def is_plain(self) -> bool:
        """Whether all options that change the update rule, such as momentum, are off."""
        return not any(getattr(self, variant) for variant in self._variants)


class Sgd(_Optimizer):
    """Stochastic gradient descent."""

    _variants = ("momentum", "nesterov")

    name: Literal["sgd"] = "sgd"
    momentum: Decay = Field(default=0.0, description="Momentum; 0 turns it off.")
    nesterov: Switch = Field(default=False, description="Nesterov's momentum.")

    @property
    def slots(self) -> tuple[str, ...]:
        return ("momentum",) if self.momentum else ()

    @classmethod
    def rules(cls, fields: Mapping[str, Any]) -> Iterator[Problem]:
        """Requires a momentum for Nesterov momentum."""
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
        return (*super().slots, "velocity_hat") if self.amsgrad else super().slots


class AdamW(Adam):
    """Adam with decoupled weight decay."""

    decay_is_decoupled = True

    name: Literal["adamw"] = "adamw"  # type: ignore[assignment]
    weight_decay: NotNegative = Field(default=4e-3, description="Decoupled weight decay.")


class Lamb(_AdamLike):
    """LAMB: Adam with layer-wise trust ratios, for large batches."""

    name: Literal["lamb"] = "lamb"
    lr: Positive = Field(default=1e-3, description="Learning rate.")


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
        momentum = ("momentum",) if self.momentum else ()
        return ("velocity", *momentum, *(("average_gradient",) if self.centered else ()))


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
    is_plain: ClassVar[bool] = False
    slots: ClassVar[tuple[str, ...]] = ()
    weight_decay: ClassVar[float] = 0.0
    name: ClassVar[str] = "custom"
    custom: References = Field(
        description="Callable that builds an optimizer, or one per framework: for a torch module "
        "(parameters, lr, **args) -> a torch optimizer, else (lr, **args) -> a Keras optimizer."
    )
    lr: Positive = Field(
        description="Learning rate (of `scaling.base_batch_size` when that is given)."
    )
    args: Options = Field(default={}, description="Keyword arguments of the callable.")
