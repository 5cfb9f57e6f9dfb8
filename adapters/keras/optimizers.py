"""The Keras optimizer of a spec, and the learning-rate schedule of a custom one.

Imported by adapters only after `keras_backend.set_backend`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import keras
import numpy as np

from isotrain.adapters.common.spec_components import (
    call_checked,
    names_option,
    resolve_for_framework,
)
from isotrain.adapters.keras import private as keras_private
from isotrain.adapters.keras.adam_variants import Muon, Nadam, Radam
from isotrain.plugin import CustomOptimizer, SpecError, TrainingSpec, WeightGroup


class KerasSchedule:
    """A Keras learning-rate schedule, evaluated on the CPU; gives the rates that `fit` would use."""

    def __init__(self, schedule: keras.optimizers.schedules.LearningRateSchedule) -> None:
        self._schedule = schedule
        self._updates: Any = None

    def __call__(self, updates: int) -> float:
        """Learning rate after `updates` updates, computed in Keras' own dtype."""
        with keras.device("cpu"):
            if self._updates is None:
                self._updates = keras.Variable(0, dtype="int", trainable=False, name="updates")
            self._updates.assign(updates)
            rate = self._schedule(self._updates)
            return float(keras.ops.convert_to_numpy(keras.ops.convert_to_tensor(rate)))


_CLIPPING = {"value": "clipvalue", "norm": "clipnorm", "global_norm": "global_clipnorm"}
_SPEC_ONLY_FIELDS = {"name", "lr", "groups", "layer_decay"}


def build_optimizer(
    spec: TrainingSpec, framework: str, name: str | None = None, weights: Sequence[str] = ()
) -> tuple[keras.optimizers.Optimizer, KerasSchedule | None]:
    """Makes the spec's Keras optimizer, with gradient clipping and, in float16, loss scaling.

    Gradients must be all-reduced before they are applied: the optimizer clips what it receives.
    Dynamic loss scaling: Micikevicius et al., arXiv 1710.03740.
    In float64, hyperparameters are rounded to float32 first, because TensorFlow passes Python
    numbers through float32 and results would otherwise differ between frameworks.

    Args:
        spec: Training spec, for the optimizer, clipping and precision.
        framework: Framework whose custom optimizer is used, where the spec has one per framework.
        name: Optimizer name, a prefix of its variables' paths; None: a unique one by Keras.
        weights: Names of the trainable weights, for a custom optimizer.

    Returns:
        The optimizer, whose learning rate is a variable; and the schedule it was created with or None, for
        `ReplicaGroup.optimizer_lr_schedule`.

    Raises:
        SpecError: The custom optimizer cannot be used, or clips or scales as the spec does.
    """
    settings = spec.optimizer
    number = _number(spec)
    schedule = None
    if isinstance(settings, CustomOptimizer):
        optimizer, schedule = _own_optimizer(settings, framework, number, weights)
        _require_no_doubles(optimizer, spec)
    else:
        optimizer = _named_optimizer(spec, number)
    if name is not None:
        optimizer = optimizer.from_config({**optimizer.get_config(), "name": name})
    if spec.clip is not None:
        for field, attribute in _CLIPPING.items():
            bound = getattr(spec.clip, field)
            setattr(optimizer, attribute, None if bound is None else number(bound))
    if spec.loss_scaling is not None:
        optimizer = keras.optimizers.LossScaleOptimizer(
            optimizer,
            initial_scale=spec.loss_scaling.initial,
            dynamic_growth_steps=spec.loss_scaling.growth_steps,
        )
    return optimizer, schedule


def _own_optimizer(
    settings: CustomOptimizer,
    framework: str,
    number: Callable[[float], float],
    weights: Sequence[str],
) -> tuple[keras.optimizers.Optimizer, KerasSchedule | None]:
    """Calls the user's optimizer function; returns the optimizer and its schedule, or None.

    Raises:
        SpecError: It returned no Keras optimizer, one whose learning rate is a plain function, or a wrapper
            of others.
    """
    factory = resolve_for_framework(settings.custom, framework, "optimizer.custom")
    form = "(learning_rate, **args)"
    options = {**names_option(factory, weights), **settings.args}
    optimizer = call_checked(form, factory, "optimizer.custom", number(settings.lr), **options)
    if not isinstance(optimizer, keras.optimizers.Optimizer):
        raise SpecError(
            f"optimizer.custom: it returned {type(optimizer).__name__!r}; for this model it must"
            f" return a Keras optimizer, from {form}."
        )
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        raise SpecError(
            "optimizer.custom: it returned a LossScaleOptimizer. Return the optimizer inside of it:"
            " losses are scaled with precision float16, as loss_scale says."
        )
    if type(optimizer).__name__ == "MultiOptimizer":  # which older versions of Keras lack
        raise SpecError(
            "optimizer.custom: it returned a MultiOptimizer, whose optimizers have a rate each, and a"
            " step has one. Return an optimizer that is not made of others."
        )
    rate = keras_private.detach_schedule(optimizer)
    if rate is not None and not isinstance(rate, keras.optimizers.schedules.LearningRateSchedule):
        raise SpecError(
            f"optimizer.custom: the learning_rate of its optimizer is a {type(rate).__name__!r}, which does"
            " not know the step. Give a number, or a keras.optimizers.schedules.LearningRateSchedule."
        )
    return optimizer, None if rate is None else KerasSchedule(rate)


def _require_no_doubles(optimizer: keras.optimizers.Optimizer, spec: TrainingSpec) -> None:
    """Refuses options set by both the spec and a custom optimizer, one of which would be lost.

    Raises:
        SpecError: Both clip gradients, or both scale the loss.
    """
    clips = [name for name in _CLIPPING.values() if getattr(optimizer, name) is not None]
    if spec.clip is not None and clips:
        raise SpecError(
            f"clip: the optimizer that optimizer.custom returned has {clips[0]} too. Leave one of the"
            " two out."
        )
    if spec.loss_scaling is not None and optimizer.loss_scale_factor is not None:
        raise SpecError(
            "precision: float16 scales the loss, and so does the loss_scale_factor of the optimizer that"
            " optimizer.custom returned. Leave that out."
        )


def _named_optimizer(
    spec: TrainingSpec, number: Callable[[float], float]
) -> keras.optimizers.Optimizer:
    classes = {
        cls.__name__.lower(): cls
        for cls in (
            keras.optimizers.SGD,
            keras.optimizers.Adam,
            keras.optimizers.AdamW,
            keras.optimizers.RMSprop,
            keras.optimizers.Adagrad,
            keras.optimizers.Lamb,
            keras.optimizers.Lion,
            Muon,
            Nadam,
            Radam,
        )
    }
    settings: Any = spec.optimizer
    options: dict[str, Any] = {
        name: number(value) if isinstance(value, float) else value
        for name, value in (
            *settings,  # not model_dump: that would first build pydantic's serializer
            *settings.slot_options_of_groups.items(),
        )
        if name not in _SPEC_ONLY_FIELDS
    }
    if settings.name != "adamw":  # Keras' AdamW takes 0 but not None, the others None but not 0
        options["weight_decay"] = options["weight_decay"] or None
    return classes[settings.name](learning_rate=number(settings.lr), **options)


def use_groups(
    spec: TrainingSpec,
    optimizer: keras.optimizers.Optimizer,
    groups: Sequence[WeightGroup],
    rates: Mapping[int, Any] = MappingProxyType({}),
) -> list[keras_private.OptionGroup]:
    """Makes the spec's optimizer, just built, update the weights of each group with the options of the group.

    Args:
        spec: Training spec, for the precision.
        optimizer: Optimizer of the spec; unchanged if all weights have its options.
        groups: Groups of the weights that it was built on.
        rates: Rates of the schedules of groups, scalars by index of the group; read in each update.

    Returns:
        The groups with the options as Keras has them; empty if all weights have those of the optimizer.
    """
    if all(group.has_spec_options for group in groups):
        return []
    number = _number(spec)
    option_groups = [
        keras_private.OptionGroup(
            frozenset(group.indices),
            group.lr_factor,
            {
                name: number(value) if isinstance(value, float) else value
                for name, value in group.options.items()
            },
            None
            if group.schedule is None
            else functools.partial(rates.__getitem__, group.schedule),
        )
        for group in groups
    ]
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    for group in option_groups:
        if (start := group.options.get("initial_accumulator_value")) is not None:
            slots = keras_private.slots_of(inner)["accumulator"]
            for slot in (slots[index] for index in group.indices):
                slot.assign(keras.ops.full_like(slot, start))
    keras_private.apply_by_groups(inner, option_groups)
    return option_groups


def momentum_option(optimizer: keras.optimizers.Optimizer) -> str | None:
    """Name of the optimizer's option that is its momentum; None without momentum."""
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    if getattr(inner, "momentum", 0):
        return "momentum"
    return "beta_1" if hasattr(inner, "beta_1") else None


def momentum_setter(
    optimizer: keras.optimizers.Optimizer, spec: TrainingSpec
) -> Callable[[float], None] | None:
    """Function that sets the momentum of later updates, which are not traced; None without momentum."""
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    option = momentum_option(optimizer)
    number = _number(spec)
    return None if option is None else lambda momentum: setattr(inner, option, number(momentum))


def loss_scale_variables(optimizer: keras.optimizers.Optimizer) -> dict[str, Any]:
    """The loss scale's variables by their state names; empty without a loss scale, or before it is built."""
    if not isinstance(optimizer, keras.optimizers.LossScaleOptimizer) or not optimizer.built:
        return {}
    return {"scale": optimizer.dynamic_scale, "steps": optimizer.step_counter}


def loss_scale(optimizer: keras.optimizers.Optimizer) -> Any | None:
    """The optimizer's loss scale, a scalar variable or number; None if losses are not scaled."""
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        return optimizer.dynamic_scale
    return optimizer.loss_scale_factor


def global_norm(gradients: Sequence[Any]) -> Any:
    """L2 norm, a scalar, of gradients of any shapes together, with the bits of Keras' own."""
    ops = keras.ops
    squares = ops.stack([ops.sum(ops.square(gradient)) for gradient in gradients])
    return ops.sqrt(ops.sum(squares))


def weight_finalizer(
    optimizer: keras.optimizers.Optimizer, weights: Sequence[Any]
) -> Callable[[], None] | None:
    """A function that overwrites weights with their exponential moving averages; None without `use_ema`.

    Args:
        optimizer: Optimizer, built on the weights.
        weights: Keras variables to overwrite.
    """
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    if not inner.use_ema:
        return None

    def finalise() -> None:
        if (
            keras.ops.convert_to_numpy(inner.iterations) > 0
        ):  # averages are zeros before the first update
            inner.finalize_variable_values(weights)

    return finalise


def _number(spec: TrainingSpec) -> Callable[[float], float]:
    """Conversion of hyperparameters: in float64, rounding to float32."""
    return float if spec.precision != "float64" else _through_float32


def _through_float32(value: float) -> float:
    return float(np.float32(value))
