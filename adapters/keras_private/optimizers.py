"""How optimizers reduce, and what they keep."""

from __future__ import annotations

from typing import Any

import keras

from isotrain.adapters.private_parts import PrivatePart, require
from isotrain.plugin import UnsupportedError


def apply_as_given(optimizer: keras.optimizers.Optimizer) -> None:
    """Turns off the sum over replicas that an optimizer does on TensorFlow after it has clipped.

    Raises:
        UnsupportedError: This version of Keras reduces in another place.
    """
    if not hasattr(optimizer, "_all_reduce_sum_gradients"):
        raise UnsupportedError(
            f"Keras {keras.__version__} reduces gradients where isotrain does not expect it;"
            " install a version from 3.10 to 3.15."
        )
    optimizer._all_reduce_sum_gradients = list


def _reduces_where_expected() -> None:
    if keras.backend.backend() != "tensorflow":
        return
    optimizer, summed = keras.optimizers.SGD(), []

    def note(pairs: Any) -> Any:
        summed.append(pairs)
        return pairs

    apply_as_given(optimizer)
    optimizer._all_reduce_sum_gradients = note
    optimizer.apply([keras.ops.ones(1)], [keras.Variable([1.0])])
    require(len(summed) == 1, "gradients are summed over replicas by this method alone")


_SLOTS = {
    "momentum": ("momentums", "_momentums"),
    "velocity": ("_velocities",),
    "velocity_hat": ("_velocity_hats",),
    "average_gradient": ("_average_gradients",),
    "accumulator": ("_accumulators",),
}


def slots_of(optimizer: keras.optimizers.Optimizer) -> dict[str, list[Any]]:
    """The slots of one of Keras' own optimizers by kind, in the order of its weights."""
    return {
        kind: list(found)
        for kind, attributes in _SLOTS.items()
        for attribute in attributes
        if (found := getattr(optimizer, attribute, None))
    }


def _keeps_slots() -> None:
    optimizers = keras.optimizers
    weights = [keras.Variable([1.0]), keras.Variable([1.0, 2.0])]
    for optimizer in (
        optimizers.SGD(momentum=0.5),
        optimizers.Adam(amsgrad=True),
        optimizers.AdamW(),
        optimizers.RMSprop(momentum=0.5, centered=True),
        optimizers.Adagrad(),
        optimizers.Lamb(),
    ):
        optimizer.build(weights)
        slots = slots_of(optimizer)
        found = {id(slot) for each in slots.values() for slot in each}
        rates = {id(optimizer.iterations), id(optimizer.variables[1])}
        name = type(optimizer).__name__
        require(found | rates == {id(v) for v in optimizer.variables}, f"all slots of {name}")
        shapes = [[tuple(slot.shape) for slot in each] for each in slots.values()]
        require(all(each == [(1,), (2,)] for each in shapes), f"slots of {name} in order")


PARTS = (
    PrivatePart("Optimizer._all_reduce_sum_gradients", _reduces_where_expected),
    PrivatePart("slots of optimizers", _keeps_slots),
)
