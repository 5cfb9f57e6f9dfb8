"""Optimizers: gradient reduction, learning-rate schedule, optimizer state."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import keras

from isotrain.adapters.common.private_api import PrivateApiProbe, require
from isotrain.plugin import UnsupportedError


def disable_gradient_reduction(optimizer: keras.optimizers.Optimizer) -> None:
    """Turns off the all-reduce over replicas that an optimizer does on TensorFlow after clipping.

    Raises:
        UnsupportedError: This version of Keras reduces gradients elsewhere.
    """
    if not hasattr(optimizer, "_all_reduce_sum_gradients"):
        raise UnsupportedError(
            f"Keras {keras.__version__} reduces gradients where isotrain does not expect it;"
            " install a version from 3.10 to 3.15."
        )
    optimizer._all_reduce_sum_gradients = list


def clipped_by_norm(
    optimizer: keras.optimizers.Optimizer,
    gradients: list[Any],
    clipnorm: float | None,
    global_clipnorm: float | None,
) -> list[Any]:
    """Gradients clipped as an optimizer with these options clips them; `apply` of this one does not.

    Args:
        optimizer: Keras optimizer without the two options.
        gradients: Gradients of the full weights, of any shapes.
        clipnorm: Largest norm of each gradient; None: any.
        global_clipnorm: Largest norm of all gradients together; None: any.
    """
    optimizer.clipnorm, optimizer.global_clipnorm = clipnorm, global_clipnorm
    try:
        clipped: list[Any] = optimizer._clip_gradients(gradients)
        return clipped
    finally:
        optimizer.clipnorm = optimizer.global_clipnorm = None


def _probe_clipped_by_norm() -> None:
    optimizer = keras.optimizers.SGD()
    for bounds in ((2.5, None), (None, 2.5)):
        (clipped,) = clipped_by_norm(optimizer, [keras.ops.convert_to_tensor([3.0, 4.0])], *bounds)
        require([round(float(each), 4) for each in clipped] == [1.5, 2.0], "clips otherwise")


def _probe_gradient_reduction() -> None:
    if keras.backend.backend() != "tensorflow":
        return
    optimizer, summed = keras.optimizers.SGD(), []

    def note(pairs: Any) -> Any:
        summed.append(pairs)
        return pairs

    disable_gradient_reduction(optimizer)
    optimizer._all_reduce_sum_gradients = note
    optimizer.apply([keras.ops.ones(1)], [keras.Variable([1.0])])
    require(len(summed) == 1, "gradients are summed over replicas by this method alone")


def detach_schedule(optimizer: keras.optimizers.Optimizer) -> Any | None:
    """Replaces an optimizer's learning-rate schedule or function by a scalar variable.

    Returns:
        The schedule or function; None if the learning rate is a variable already.
    """
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    rate = inner._learning_rate
    if isinstance(rate, keras.Variable):
        return None
    with keras.name_scope(inner.name, caller=inner):
        variable = keras.Variable(
            0.0, name="learning_rate", trainable=False, aggregation="only_first_replica"
        )
    inner._track_variable(
        variable
    )  # first: assigning an untracked variable to an attribute would track it too
    inner._learning_rate = variable
    return rate


def _probe_detach_schedule() -> None:
    schedule = keras.optimizers.schedules.ExponentialDecay(8.0, 1, 0.5)
    optimizer, weight = keras.optimizers.SGD(schedule), keras.Variable([1.0])
    require(detach_schedule(optimizer) is schedule, "an optimizer keeps its schedule")
    require(detach_schedule(optimizer) is None, "a rate that is a variable")
    optimizer.build([weight])
    paths = [variable.path for variable in optimizer.variables]
    plain = keras.optimizers.SGD(0.5, name=optimizer.name)
    require(
        paths == [variable.path for variable in plain.variables], "the variables of a plain one"
    )
    optimizer.learning_rate.assign(0.5)
    optimizer.apply([keras.ops.ones(1)], [weight])
    require(
        float(keras.ops.convert_to_numpy(weight)[0]) == 0.5, "an update at the rate of the variable"
    )


_SLOTS = {
    "momentum": ("momentums", "_momentums"),
    "velocity": ("_velocities",),
    "velocity_hat": ("_velocity_hats",),
    "average_gradient": ("_average_gradients",),
    "accumulator": ("_accumulators",),
}


def slots_of(optimizer: keras.optimizers.Optimizer) -> dict[str, list[Any]]:
    """Optimizer state variables of a built-in Keras optimizer by kind, in the order of its weights."""
    return {
        kind: list(variables)
        for kind, attributes in _SLOTS.items()
        for attribute in attributes
        if (variables := getattr(optimizer, attribute, None))
    }


def _probe_slots_of() -> None:
    optimizers = keras.optimizers
    weights = [keras.Variable([1.0]), keras.Variable([1.0, 2.0])]
    for optimizer in (
        optimizers.SGD(momentum=0.5),
        optimizers.Adam(amsgrad=True),
        optimizers.AdamW(),
        optimizers.RMSprop(momentum=0.5, centered=True),
        optimizers.Adagrad(),
        optimizers.Lamb(),
        optimizers.Lion(),
    ):
        optimizer.build(weights)
        slots = slots_of(optimizer)
        slot_ids = {id(slot) for each in slots.values() for slot in each}
        scalars = {id(optimizer.iterations), id(optimizer.variables[1])}
        name = type(optimizer).__name__
        require(slot_ids | scalars == {id(v) for v in optimizer.variables}, f"all slots of {name}")
        shapes = [[tuple(slot.shape) for slot in each] for each in slots.values()]
        require(all(each == [(1,), (2,)] for each in shapes), f"slots of {name} in order")


def momentum_of(optimizer: keras.optimizers.SGD, variable: Any) -> Any:
    """Momentum variable of a weight in SGD; `variable` is the weight as `update_step` receives it."""
    return optimizer.momentums[optimizer._get_variable_index(variable)]


def _probe_slot_index() -> None:
    if keras.backend.backend() != "tensorflow":
        return
    weights = [keras.Variable([1.0]), keras.Variable([1.0, 2.0])]
    optimizer, momentums = keras.optimizers.SGD(momentum=0.5), []

    def note(gradient: Any, variable: Any, rate: Any) -> None:
        momentums.append(momentum_of(optimizer, variable))

    optimizer.update_step = note
    optimizer.apply([keras.ops.ones(1), keras.ops.ones(2)], weights)
    slots = slots_of(optimizer)["momentum"]
    require(list(map(id, momentums)) == list(map(id, slots)), "the momentum of each weight")


@dataclass(frozen=True)
class OptionGroup:
    """Weights with optimizer options of their own.

    Attributes:
        indices: Indices of the weights among those that the optimizer was built on.
        lr_factor: What the learning rate is multiplied by.
        options: Values of attributes of the optimizer, by name.
        rate: Function that returns the learning rate of an update, a scalar; None for the optimizer's.
    """

    indices: frozenset[int]
    lr_factor: float
    options: Mapping[str, Any]
    rate: Callable[[], Any] | None = None


def apply_by_groups(optimizer: keras.optimizers.Optimizer, groups: Sequence[OptionGroup]) -> None:
    """Makes a built optimizer update the weights of each group with the options of the group.

    Each weight is in one group.
    """
    update, decay = optimizer._backend_update_step, optimizer._apply_weight_decay
    learning_rate = optimizer._get_current_learning_rate
    changed = {name for group in groups for name in group.options}
    common = {name: getattr(optimizer, name) for name in changed}

    def set_options(group: OptionGroup) -> None:
        for name, value in (common | dict(group.options)).items():
            setattr(optimizer, name, value)
        rate = group.rate or learning_rate
        optimizer._get_current_learning_rate = (
            rate if group.lr_factor == 1.0 else lambda: rate() * group.lr_factor
        )

    @contextlib.contextmanager
    def options_of(group: OptionGroup) -> Iterator[None]:
        set_options(group)
        try:
            yield
        finally:
            set_options(OptionGroup(frozenset(), 1.0, {}))

    def members(group: OptionGroup, variables: Sequence[Any]) -> list[int]:
        indices = map(optimizer._get_variable_index, variables)
        return [place for place, index in enumerate(indices) if index in group.indices]

    def decay_by_group(variables: Sequence[Any]) -> None:
        for group in groups:
            local = [variables[place] for place in members(group, variables)]
            with options_of(group):
                if local and optimizer.weight_decay:
                    decay(local)

    def update_by_group(gradients: Sequence[Any], variables: Sequence[Any], rate: Any) -> None:
        for group in groups:
            places = members(group, variables)
            if places:
                with options_of(group):
                    update(
                        [gradients[place] for place in places],
                        [variables[place] for place in places],
                        optimizer.learning_rate,
                    )

    optimizer._apply_weight_decay = decay_by_group
    optimizer._backend_update_step = update_by_group


def _probe_groups() -> None:
    weights = [keras.Variable([1.0]), keras.Variable([1.0])]
    optimizer = keras.optimizers.SGD(0.5, weight_decay=0.5)
    optimizer.build(weights)
    groups = [
        OptionGroup(frozenset({0}), 0.5, {"weight_decay": None}),
        OptionGroup(frozenset({1}), 1.0, {}),
    ]
    apply_by_groups(optimizer, groups)
    optimizer.apply([keras.ops.ones(1)] * 2, weights)
    values = [float(keras.ops.convert_to_numpy(weight)[0]) for weight in weights]
    require(values == [0.75, 0.25], "an update and weight decay by group")


PROBES = (
    PrivateApiProbe("Optimizer._backend_update_step", _probe_groups),
    PrivateApiProbe("Optimizer._learning_rate", _probe_detach_schedule),
    PrivateApiProbe("Optimizer._all_reduce_sum_gradients", _probe_gradient_reduction),
    PrivateApiProbe("Optimizer._clip_gradients", _probe_clipped_by_norm),
    PrivateApiProbe("slots of optimizers", _probe_slots_of),
    PrivateApiProbe("Optimizer._get_variable_index", _probe_slot_index),
)
