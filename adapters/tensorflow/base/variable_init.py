"""What new variables hold at first: every process makes values, and takes those of replica 0, all at once."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from isotrain.adapters.tensorflow.base.private_api import copies

BroadcastFirst = Callable[[np.ndarray], np.ndarray]
"""Gives every process the whole numbers that replica 0 has; called by all with arrays of equal length."""
_WORD_BYTES = 8
_MOST_BYTES = 1 << 26
_MOST_WORDS = _MOST_BYTES // _WORD_BYTES


class InitialValues:
    """Variables under a MultiWorkerMirroredStrategy, which would itself send the value of each as it is made.

    That takes every process milliseconds for each, however small. Here a variable has the value that its
    process has computed, until `share`.
    """

    def __init__(self, strategy: tf.distribute.Strategy, replica: int) -> None:
        """Makes nothing yet.

        Args:
            strategy: With one replica in each process.
            replica: That of this process.
        """
        self._strategy = strategy
        self._is_first = replica == 0
        self._own: list[Any] = []
        """The values of the variables that are being made."""
        self._made: list[tf.Variable] = []

    @contextlib.contextmanager
    def scope(self) -> Iterator[None]:
        """As the scope of the strategy."""
        # Creators call each other from the innermost outwards. The strategy's is between these two, and
        # puts what would send a value in the place of the value.
        with (
            tf.variable_creator_scope(self._with_own_value),
            self._strategy.scope(),
            tf.variable_creator_scope(self._noted),
        ):
            yield

    def _noted(self, create: Callable[..., tf.Variable], **options: Any) -> tf.Variable:
        self._own.append(options["initial_value"])
        try:
            self._made.append(create(**options))
        finally:
            self._own.pop()
        return self._made[-1]

    def _with_own_value(self, create: Callable[..., tf.Variable], **options: Any) -> tf.Variable:
        return create(**{**options, "initial_value": self._own[-1]})

    def share(self) -> None:
        """Gives what was made within the scope the values of replica 0. Called by every process."""
        made, self._made = self._made, []
        broadcast_initial_values(made, self._sent)

    def _sent(self, words: np.ndarray) -> np.ndarray:
        """The sum over all processes, of which only replica 0 gives other numbers than 0."""
        given = tf.constant(words if self._is_first else np.zeros_like(words))
        total: np.ndarray = self._strategy.reduce("SUM", given, axis=None).numpy()
        return total


def broadcast_initial_values(variables: Sequence[tf.Variable], send: BroadcastFirst) -> None:
    """Gives variables the values of replica 0. Called by every process; not traced.

    Args:
        variables: The same on every process, with one copy in each.
        send: Brings the values here.
    """
    bundle: list[tuple[tf.Variable, np.ndarray]] = []
    size = 0
    for variable in (copies(each)[0] for each in variables):
        if variable.dtype == tf.string:  # no collective knows these
            continue
        bundle.append((variable, variable.value().numpy()))
        size += bundle[-1][1].nbytes
        if size > _MOST_BYTES:
            _take(bundle, send)
            bundle, size = [], 0
    if bundle:
        _take(bundle, send)


def _take(bundle: Sequence[tuple[tf.Variable, np.ndarray]], send: BroadcastFirst) -> None:
    size = sum(value.nbytes for _, value in bundle)
    own = np.zeros(-(-size // _WORD_BYTES), np.int64)
    first = np.empty_like(own)
    own_bytes, first_bytes = own.view(np.uint8), first.view(np.uint8)
    places, end = [], 0
    for _, value in bundle:
        places.append(slice(end, end := end + value.nbytes))
        own_bytes[places[-1]] = np.ascontiguousarray(value).reshape(-1).view(np.uint8)
    for start in range(0, len(own), _MOST_WORDS):  # a large variable goes in several messages
        part = slice(start, start + _MOST_WORDS)
        first[part] = send(own[part])
    for (variable, value), place in zip(bundle, places, strict=True):
        if not np.array_equal(first_bytes[place], own_bytes[place]):
            variable.assign(np.frombuffer(first_bytes[place], value.dtype).reshape(value.shape))
