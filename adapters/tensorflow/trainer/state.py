"""Named state of the replicas of one process, read and written as NumPy arrays."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from isotrain.adapters.keras import model as keras_model
from isotrain.adapters.tensorflow.base.private_api import copies
from isotrain.adapters.tensorflow.base.variables import nbytes
from isotrain.plugin import IsotrainError, StateInfo, StateKind, unknown_name


class NamedState:
    """The state of each replica here: weights under their names, all else under `KIND/...`."""

    def __init__(
        self,
        trainable: Sequence[Any],
        others: Sequence[Any],
        kinds: Mapping[StateKind, Callable[[], Mapping[str, Any]]],
    ) -> None:
        """Names variables.

        Args:
            trainable: Weights that are trained.
            others: The other weights.
            kinds: Gives the variables of each other kind by name, which lack the prefix of the kind.
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

    def read(self, kinds: Sequence[StateKind], place: int = 0) -> dict[str, np.ndarray]:
        """Copies state of these kinds, that of the replica at a place here; bfloat16 becomes float32."""
        return {name: to_numpy(copies(v)[place]) for name, v in self._found(kinds).items()}

    def describe(self, kinds: Sequence[StateKind]) -> dict[str, StateInfo]:
        """Tells what `read` would give."""
        return {name: _described(variable) for name, variable in self._found(kinds).items()}

    def _found(self, kinds: Sequence[StateKind]) -> dict[str, tf.Variable]:
        """The variables of some kinds, under their whole names."""
        found: dict[str, tf.Variable] = {}
        for kind, variables in self._kinds.items():
            if kind in kinds:
                own = variables().items()
                found |= {f"{kind}/{name}": native(variable) for name, variable in own}
        weights = [self._weights[kind] for kind in self._weights if kind in kinds]
        return {name: v for own in weights for name, v in own.items()} | found

    def write(self, state: Mapping[str, np.ndarray], place: int | None = None) -> None:
        """Sets state on the replica at a place here, or on each.

        Raises:
            IsotrainError: A name or a shape does not fit this model.
        """
        known = self._found((*self._weights, *self._kinds))
        for name, array in state.items():
            if name not in known:
                raise IsotrainError(unknown_name("state", name, known))
            variable = known[name]
            if variable.shape != np.shape(array):
                raise IsotrainError(
                    f"{name!r} has shape {tuple(variable.shape)} in this model, and the given state"
                    f" has {np.shape(array)}."
                )
            here = copies(variable)
            for copy in here if place is None else here[place : place + 1]:
                copy.assign(tf.cast(tf.convert_to_tensor(array), copy.dtype))


def slots(optimizer: keras.optimizers.Optimizer, rate: Any) -> dict[str, Any]:
    """An optimizer's variables by name, its learning rate among them; without those of a loss scale."""
    scale = {id(v) for v in keras_model.loss_scale_variables(optimizer).values()}
    found = [*(v for v in optimizer.variables if id(v) not in scale), rate]
    return dict(zip(canonical_names(found), found, strict=True))


def sums(metrics: Mapping[str, keras.metrics.Metric]) -> dict[str, Any]:
    """What metrics add up, as `METRIC/SUM`."""
    return {
        f"{shown}/{name}": variable
        for shown, metric in metrics.items()
        for name, variable in zip(keras_model.sum_names(metric), metric.variables, strict=True)
    }


def part_of(state: Mapping[str, np.ndarray], metrics: Iterable[str]) -> dict[str, np.ndarray]:
    """What a state has of some metrics."""
    starts = tuple(f"metrics/{name}/" for name in metrics)
    return {name: value for name, value in state.items() if name.startswith(starts)}


def native(variable: Any) -> tf.Variable:
    """The TensorFlow variable behind a Keras variable."""
    return variable.value if isinstance(variable, keras.Variable) else variable


def _described(variable: tf.Variable) -> StateInfo:
    return StateInfo(tuple(variable.shape), variable.dtype.name, nbytes(variable))


def to_numpy(tensor: Any) -> np.ndarray:
    """Copies a tensor to NumPy; bfloat16, which NumPy lacks, becomes float32."""
    tensor = tf.convert_to_tensor(tensor)
    if tensor.dtype == tf.bfloat16:
        tensor = tf.cast(tensor, tf.float32)
    return np.array(tensor.numpy())


def canonical_names(variables: Sequence[Any]) -> list[str]:
    """Names Keras variables by their path and others by their name, numbered where two collide."""
    return keras_model.canonical_names([_Named(variable) for variable in variables])


class _Named:
    """Gives any variable the `path` by which Keras variables are named."""

    def __init__(self, variable: Any) -> None:
        is_keras = isinstance(variable, keras.Variable)
        self.path = variable.path if is_keras else variable.name.rpartition(":")[0]
