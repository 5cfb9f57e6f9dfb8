"""Initial values of variables: every process computes them, then all take those of replica 0, in bulk."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from isotrain.adapters.tensorflow.base.private_api import copies
from isotrain.adapters.tensorflow.base.without_values import lacks_value

BroadcastFirst = Callable[[np.ndarray], np.ndarray]
"""Broadcasts an int64 vector from replica 0; called by every process with vectors of equal length."""
_WORD_BYTES = 8
_MOST_BYTES = 1 << 26
_MOST_WORDS = _MOST_BYTES // _WORD_BYTES


class InitialValues:
    """Creates variables under a MultiWorkerMirroredStrategy without one broadcast per variable.

    The strategy itself would broadcast the value of each variable as it is created, which takes every process
    milliseconds for each, however small. Here a variable keeps its local value until `broadcast`.
    """

    def __init__(self, strategy: tf.distribute.Strategy, replica: int) -> None:
        """Creates nothing yet.

        Args:
            strategy: Strategy with one replica in each process.
            replica: Index of this process's replica.
        """
        self._strategy = strategy
        self._is_first = replica == 0
        self._local_values: list[Any] = []
        """Initial values of the variables that are being created (a stack)."""
        self._created: list[tf.Variable] = []

    @contextlib.contextmanager
    def scope(self) -> Iterator[None]:
        """The strategy's scope, in which variables are created with their local values."""
        # Creators call each other from the innermost outwards. The strategy's is between these two, and
        # replaces the initial value by a broadcast of it.
        with (
            tf.variable_creator_scope(self._with_local_value),
            self._strategy.scope(),
            tf.variable_creator_scope(self._record),
        ):
            yield

    def _record(self, create: Callable[..., tf.Variable], **options: Any) -> tf.Variable:
        """Creates a variable of any shape, and notes it for `broadcast`."""
        self._local_values.append(options["initial_value"])
        try:
            self._created.append(create(**options))
        finally:
            self._local_values.pop()
        return self._created[-1]

    def _with_local_value(self, create: Callable[..., tf.Variable], **options: Any) -> tf.Variable:
        """Creates a variable with the initial value, of its shape, that `_record` got."""
        return create(**{**options, "initial_value": self._local_values[-1]})

    def broadcast(self) -> None:
        """Broadcasts the values of the variables made within the scope from replica 0. Collective."""
        created, self._created = self._created, []
        broadcast_initial_values(created, self._broadcast_words)

    def _broadcast_words(self, words: np.ndarray) -> np.ndarray:
        """Broadcasts an int64 vector from replica 0, as a sum to which all others contribute zeros.

        Collective.
        """
        contribution = tf.constant(words if self._is_first else np.zeros_like(words))
        total: np.ndarray = self._strategy.reduce("SUM", contribution, axis=None).numpy()
        return total


def broadcast_initial_values(variables: Sequence[tf.Variable], send: BroadcastFirst) -> None:
    """Broadcasts the values of variables from replica 0. Collective; not traced.

    Args:
        variables: The same variables on every process, with one copy in each.
        send: Broadcasts an int64 vector from replica 0.
    """
    bundle: list[tuple[tf.Variable, np.ndarray]] = []
    nbytes = 0
    for variable in (copies(each)[0] for each in variables):
        if variable.dtype == tf.string or lacks_value(variable):  # no collective supports strings
            continue
        bundle.append((variable, variable.value().numpy()))
        nbytes += bundle[-1][1].nbytes
        if nbytes > _MOST_BYTES:
            _broadcast_bundle(bundle, send)
            bundle, nbytes = [], 0
    if bundle:
        _broadcast_bundle(bundle, send)


def _broadcast_bundle(
    bundle: Sequence[tuple[tf.Variable, np.ndarray]], send: BroadcastFirst
) -> None:
    """Broadcasts a few variables as one int64 vector, and assigns those that differ."""
    nbytes = sum(value.nbytes for _, value in bundle)
    local_words = np.zeros(-(-nbytes // _WORD_BYTES), np.int64)
    root_words = np.empty_like(local_words)
    local_bytes, root_bytes = local_words.view(np.uint8), root_words.view(np.uint8)
    slices, end = [], 0
    for _, value in bundle:
        slices.append(slice(end, end := end + value.nbytes))
        local_bytes[slices[-1]] = np.ascontiguousarray(value).reshape(-1).view(np.uint8)
    for start in range(0, len(local_words), _MOST_WORDS):  # in several messages if large
        chunk = slice(start, start + _MOST_WORDS)
        root_words[chunk] = send(local_words[chunk])
    for (variable, value), position in zip(bundle, slices, strict=True):
        if not np.array_equal(root_bytes[position], local_bytes[position]):
            variable.assign(np.frombuffer(root_bytes[position], value.dtype).reshape(value.shape))
