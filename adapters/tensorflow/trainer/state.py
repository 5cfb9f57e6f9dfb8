"""Named state of the replicas of one process, read and written as NumPy arrays."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, Self

import keras
import numpy as np
import tensorflow as tf

from isotrain.adapters.keras import model as keras_model
from isotrain.adapters.tensorflow.base.private_api import copies
from isotrain.adapters.tensorflow.base.variables import nbytes
from isotrain.plugin import IsotrainError, StateInfo, StateKind, unknown_name


class NamedState:
    """State of each local replica: weights under their names, all else under `KIND/NAME`."""

    def __init__(
        self,
        trainable: Sequence[Any],
        others: Sequence[Any],
        kinds: Mapping[StateKind, Callable[[], Mapping[str, Any]]],
    ) -> None:
        """Names the variables.

        Args:
            trainable: Trainable weights.
            others: Other weights.
            kinds: For each other kind of state, a function that returns its variables by name, without the
                prefix of the kind.
        """
        names = canonical_names([*trainable, *others])
        variables = [native(variable) for variable in (*trainable, *others)]
        weights = dict(zip(names, variables, strict=True))
        count = len(trainable)
        self._weights: dict[StateKind, dict[str, tf.Variable]] = {
            "trainable": {name: weights[name] for name in names[:count]},
            "non-trainable": {name: weights[name] for name in names[count:]},
        }
        self._kinds = kinds

    def for_update(
        self, trainable: Collection[str], kinds: Mapping[StateKind, Callable[[], Mapping[str, Any]]]
    ) -> Self:
        """The state under the same names, where only some weights are trainable.

        Args:
            trainable: Names of these weights.
            kinds: Variables by name of each other kind of state.
        """
        state = copy.copy(self)
        weights = {n: each for section in self._weights.values() for n, each in section.items()}
        state._weights = {
            "trainable": {n: each for n, each in weights.items() if n in trainable},
            "non-trainable": {n: each for n, each in weights.items() if n not in trainable},
        }
        state._kinds = kinds
        return state

    def read(self, kinds: Sequence[StateKind], index: int = 0) -> dict[str, np.ndarray]:
        """Copies state of these kinds from a local replica; bfloat16 becomes float32.

        Args:
            kinds: Kinds of state.
            index: Index of the replica among the local ones.
        """
        return {
            name: to_numpy(copies(variable)[index])
            for name, variable in self._variables(kinds).items()
        }

    def describe(self, kinds: Sequence[StateKind]) -> dict[str, StateInfo]:
        """Shapes, dtypes and sizes of the state that `read` returns."""
        return {
            name: described_tensor(variable) for name, variable in self._variables(kinds).items()
        }

    def _variables(self, kinds: Sequence[StateKind]) -> dict[str, tf.Variable]:
        """Variables of these kinds, of any shape, by full name."""
        named: dict[str, tf.Variable] = {}
        for kind, variables in self._kinds.items():
            if kind in kinds:
                items = variables().items()
                named |= {f"{kind}/{name}": native(variable) for name, variable in items}
        weights = [self._weights[kind] for kind in self._weights if kind in kinds]
        return {name: variable for items in weights for name, variable in items.items()} | named

    def write(self, state: Mapping[str, np.ndarray], index: int | None = None) -> None:
        """Sets state on one local replica, or on all.

        Args:
            state: Arrays by name.
            index: Index of the replica among the local ones; None: all.

        Raises:
            IsotrainError: A name or a shape does not fit this model.
        """
        variables = self._variables((*self._weights, *self._kinds))
        for name, array in state.items():
            if name not in variables:
                raise IsotrainError(unknown_name("state", name, variables))
            variable = variables[name]
            if variable.shape != np.shape(array):
                raise IsotrainError(
                    f"{name!r}: expected shape {tuple(variable.shape)}, as in this model; received"
                    f" {np.shape(array)}."
                )
            local_copies = copies(variable)
            for each in local_copies if index is None else local_copies[index : index + 1]:
                each.assign(tf.cast(tf.convert_to_tensor(array), each.dtype))


def slots(optimizer: keras.optimizers.Optimizer, rate: Any) -> dict[str, Any]:
    """An optimizer's variables by name, with its learning rate, without those of a loss scale."""
    scale = {id(variable) for variable in keras_model.loss_scale_variables(optimizer).values()}
    variables = [*(variable for variable in optimizer.variables if id(variable) not in scale), rate]
    return dict(zip(canonical_names(variables), variables, strict=True))


def sums(metrics: Mapping[str, keras.metrics.Metric]) -> dict[str, Any]:
    """Accumulators of metrics, by `METRIC/ACCUMULATOR`."""
    return {
        f"{shown}/{name}": variable
        for shown, metric in metrics.items()
        for name, variable in zip(keras_model.sum_names(metric), metric.variables, strict=True)
    }


def metric_state(state: Mapping[str, np.ndarray], metrics: Iterable[str]) -> dict[str, np.ndarray]:
    """The entries of a state, of any shape, that belong to these metrics."""
    prefixes = tuple(f"metrics/{name}/" for name in metrics)
    return {name: value for name, value in state.items() if name.startswith(prefixes)}


def native(variable: Any) -> tf.Variable:
    """The TensorFlow variable, of any shape, behind a Keras variable."""
    return variable.value if isinstance(variable, keras.Variable) else variable


def described_tensor(variable: tf.Variable | tf.Tensor) -> StateInfo:
    """Shape, dtype and size of a variable or tensor."""
    return StateInfo(tuple(variable.shape), variable.dtype.name, nbytes(variable))


def to_numpy(tensor: Any) -> np.ndarray:
    """Copies a tensor to NumPy; bfloat16, which NumPy lacks, becomes float32."""
    tensor = tf.convert_to_tensor(tensor)
    if tensor.dtype == tf.bfloat16:
        tensor = tf.cast(tensor, tf.float32)
    return np.array(tensor.numpy())


def canonical_names(variables: Sequence[Any]) -> list[str]:
    """Names Keras variables by their path and others by their name, numbered where names collide."""
    return keras_model.canonical_names([_Named(variable) for variable in variables])


class _Named:
    """Gives any variable the `path` by which Keras variables are named."""

    def __init__(self, variable: Any) -> None:
        is_keras = isinstance(variable, keras.Variable)
        self.path = variable.path if is_keras else variable.name.rpartition(":")[0]
