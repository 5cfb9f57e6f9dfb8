"""Creating, reading and assigning variables, while a replica is traced or outside of it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from isotrain.adapters.keras.weight_sharding import named_like


@contextlib.contextmanager
def undo_where(condition: tf.Tensor, variables: Sequence[tf.Variable]) -> Iterator[None]:
    """Context that restores the variables' values at its end, where `condition` (a scalar) is true."""
    before = [value_of(variable) for variable in variables]
    yield
    for variable, value in zip(variables, before, strict=True):
        variable.assign(tf.where(condition, value, value_of(variable)))


def value_of(variable: tf.Variable) -> tf.Tensor:
    """This replica's current value of a variable: a tensor of its shape and dtype."""
    return tf.identity(tf.convert_to_tensor(variable))


def assign_all(variables: Sequence[tf.Variable], values: Sequence[tf.Tensor]) -> None:
    """Assigns each variable a value of its shape and dtype."""
    for variable, value in zip(variables, values, strict=True):
        variable.assign(value)


def named_as(weight: Any, shape: Sequence[int], compute: Callable[[], tf.Tensor]) -> Any:
    """A variable with a weight's name, after which slots are named, and its dtype.

    Args:
        weight: Variable of TensorFlow or of Keras.
        shape: Shape of the new one.
        compute: Returns its initial value, of this shape.
    """
    if not isinstance(weight, keras.Variable):
        return tf.Variable(compute, name=weight.name.rpartition(":")[0])
    with named_like(weight.path) as name:
        return keras.Variable(
            lambda shape, dtype: compute(), shape=shape, dtype=weight.dtype, name=name
        )


def assign_anew(variable: tf.Variable, value: tf.Tensor) -> Any:
    """Assigns a value of any shape: a variable's own `assign` requires the same shape."""
    return tf.raw_ops.AssignVariableOp(resource=variable.handle, value=value, validate_shape=False)


def flatten(tensors: Sequence[tf.Tensor], dtype: tf.DType) -> tf.Tensor:
    """Concatenates tensors of any shapes into one vector of a dtype."""
    return tf.concat([tf.reshape(tf.cast(tensor, dtype), [-1]) for tensor in tensors], axis=0)


def nbytes(variable: tf.Variable) -> int:
    """Size of a variable in bytes."""
    return int(variable.shape.num_elements() * variable.dtype.size)
