"""Named state of the replicas of one process, read and written as NumPy arrays."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from isotrain.adapters import portable
from isotrain.adapters.tensorflow.private import copies
from isotrain.plugin import IsotrainError, StateInfo, unknown_name

_OPTIMIZER = "optimizer/"


class NamedState:
    """Weights and optimizer slots under their canonical names."""

    def __init__(self, trainable: list[Any], others: list[Any], slots: list[Any]) -> None:
        names = canonical_names(trainable + others)
        slot_names = [_OPTIMIZER + name for name in canonical_names(slots)]
        variables = [native(variable) for variable in (*trainable, *others, *slots)]
        self._variables = dict(zip(names + slot_names, variables, strict=True))
        count = len(trainable)
        self._names = {
            "trainable": names[:count],
            "non-trainable": names[count:],
            "optimizer": slot_names,
        }

    def read(self, kinds: Sequence[str]) -> dict[str, np.ndarray]:
        """Copies state of these kinds, that of the first replica here; bfloat16 becomes float32."""
        return {name: to_numpy(copies(self._variables[name])[0]) for name in self._wanted(kinds)}

    def describe(self, kinds: Sequence[str]) -> dict[str, StateInfo]:
        """Tells what `read` would give."""
        return {name: _described(self._variables[name]) for name in self._wanted(kinds)}

    def _wanted(self, kinds: Sequence[str]) -> list[str]:
        return [name for kind in self._names if kind in kinds for name in self._names[kind]]

    def write(self, state: Mapping[str, np.ndarray]) -> None:
        """Sets state on every replica here.

        Raises:
            IsotrainError: A name or a shape does not fit this model.
        """
        for name, array in state.items():
            if name not in self._variables:
                raise IsotrainError(unknown_name("state", name, self._variables))
            variable = self._variables[name]
            if variable.shape != np.shape(array):
                raise IsotrainError(
                    f"{name!r} has shape {tuple(variable.shape)} in this model, and the given state"
                    f" has {np.shape(array)}."
                )
            for copy in copies(variable):
                copy.assign(tf.cast(tf.convert_to_tensor(array), copy.dtype))


def native(variable: Any) -> tf.Variable:
    """The TensorFlow variable behind a Keras variable."""
    return variable.value if isinstance(variable, keras.Variable) else variable


def _described(variable: tf.Variable) -> StateInfo:
    dtype = tf.float32 if variable.dtype == tf.bfloat16 else variable.dtype
    nbytes = variable.shape.num_elements() * variable.dtype.size
    return StateInfo(tuple(variable.shape), dtype.name, nbytes)


def to_numpy(tensor: Any) -> np.ndarray:
    """Copies a tensor to NumPy; bfloat16, which NumPy lacks, becomes float32."""
    tensor = tf.convert_to_tensor(tensor)
    if tensor.dtype == tf.bfloat16:
        tensor = tf.cast(tensor, tf.float32)
    return np.array(tensor.numpy())


def canonical_names(variables: Sequence[Any]) -> list[str]:
    """Names Keras variables by their path and others by their name, numbered where two collide."""
    return portable.canonical_names([_Named(variable) for variable in variables])


class _Named:
    """Gives any variable the `path` by which Keras variables are named."""

    def __init__(self, variable: Any) -> None:
        is_keras = isinstance(variable, keras.Variable)
        self.path = variable.path if is_keras else variable.name.rpartition(":")[0]
