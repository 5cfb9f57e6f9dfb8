"""What a group's replicas compute: traced once, and called on batches again and again."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any, TypeAlias

import tensorflow as tf

from isotrain.adapters.tensorflow.exchange import Communicator
from isotrain.adapters.tensorflow.keras_tracing import local_mean_losses, random_streams
from isotrain.adapters.tensorflow.program import MicroBatch
from isotrain.plugin import Batch, Weighted

MicroBatches = tuple[tuple[MicroBatch, ...], ...]
"""Per local replica its slices."""

Weights: TypeAlias = "tf.Tensor | None"
"""Shape `[local replicas, micro_batches]`; None when every weight is 1."""

_CACHED_TENSORS = 256


class TracedFunctions:
    """The traced functions of a group, by what they compute."""

    def __init__(
        self,
        strategy: tf.distribute.Strategy,
        communicator: Communicator,
        use_default_generator: Callable[[], None],
    ) -> None:
        """Traces nothing yet.

        Args:
            strategy: Holds the local replicas.
            communicator: Ties them to all others.
            use_default_generator: Called in each thread where a replica is traced; see `ReplicaTrainer`.
        """
        self._strategy = strategy
        self._communicator = communicator
        self._draw_unseeded = use_default_generator
        self._functions: dict[Any, Callable[..., Any]] = {}
        self._tensors: dict[tuple[Any, ...], tf.Tensor] = {}

    def forget(self) -> None:
        """Has everything traced anew when it is called next."""
        self._functions.clear()
        self._tensors.clear()

    def on_batch(
        self, name: str, trace: Callable[..., Any], batch: Batch, *tensors: tf.Tensor
    ) -> Any:
        """Calls the traced form of `trace(holes, micro_batches, weights, *tensors)` on a batch.

        It is traced anew where weights are needed, and where a slice may be a placeholder. It gets
        a flat list of tensors: nested arguments cost 100 microseconds more in each call.
        """
        if batch.even and len(batch.slices[0]) == 1:
            function = self._made(name, lambda: _flat(trace, False, batch, given_weights=False))
            return function(*_leaves(batch), *tensors)
        weights = tuple([tuple([micro_batch.weight for micro_batch in own]) for own in batch.slices])
        holes = any(0.0 in own for own in weights)
        key = (name, len(weights[0]), holes)
        function = self._made(key, lambda: _flat(trace, holes, batch))
        return function(*_leaves(batch), self._tensor_of(weights), *tensors)

    def on_counts(self, trace: Callable[..., Any], batch: Batch) -> None:
        """Calls the traced form of `trace(holes, micro_batches, counts)` on a batch to evaluate on."""
        counts = tuple([tuple([micro_batch.count for micro_batch in own]) for own in batch.slices])
        holes = any(0 in own for own in counts)
        weighed = isinstance(batch.slices[0][0].targets, Weighted)
        key = ("evaluate", len(counts[0]), holes, weighed)
        function = self._made(key, lambda: _flat(trace, holes, batch))
        function(*_leaves(batch), self._tensor_of(counts))

    def only_trace(self, trace: Callable[[bool, MicroBatches, Weights], None], batch: Batch) -> None:
        """Traces `trace(holes, micro_batches, weights)` for batches like this one, and computes nothing."""
        flat = _flat(trace, False, batch, given_weights=False)
        tf.function(flat, autograph=False).get_concrete_function(*_leaves(batch))

    def function(self, key: Any, trace: Callable[..., Any]) -> Callable[..., Any]:
        """The traced form of `trace`, the first that came with this key."""
        return self._made(key, lambda: trace)

    def _made(self, key: Any, make: Callable[[], Callable[..., Any]]) -> Callable[..., Any]:
        """The traced form of what `make` gives, made once per key."""
        function = self._functions.get(key)
        if function is None:
            function = self._functions[key] = tf.function(make(), autograph=False)
        return function

    def on_replicas(self, replica: Callable[[int], Any], trains: bool = False) -> list[Any]:
        """Traces `replica(position)` on each local replica; one result per local replica.

        Args:
            replica: Gets the replica's place among the local ones.
            trains: Whether random numbers must differ between replicas.
        """
        communicator, strategy = self._communicator, self._strategy

        def traced() -> Any:
            self._draw_unseeded()
            return replica(communicator.local_index())

        with contextlib.ExitStack() as around:
            around.enter_context(local_mean_losses())
            if trains:
                around.enter_context(random_streams(communicator.replica_index))
            results = strategy.run(traced)
        return [
            tf.nest.map_structure(functools.partial(_local, strategy, position), results)
            for position in range(len(communicator.local_replicas))
        ]

    def _tensor_of(self, values: tuple[Any, ...]) -> tf.Tensor:
        """A float64 tensor of nested numbers, made once."""
        tensor = self._tensors.get(values)
        if tensor is None:
            if len(self._tensors) >= _CACHED_TENSORS:
                self._tensors.clear()
            tensor = self._tensors[values] = tf.constant(values, tf.float64)
        return tensor


def _leaves(batch: Batch) -> list[tf.Tensor]:
    """The tensors of a batch, one after the other."""
    leaves: list[tf.Tensor] = []
    for own in batch.slices:
        for micro_batch in own:
            for part in (micro_batch.inputs, micro_batch.targets):
                if isinstance(part, tf.Tensor):
                    leaves.append(part)
                else:
                    leaves.extend(tf.nest.flatten(part))
    return leaves


def _flat(
    trace: Callable[..., Any], holes: bool, batch: Batch, given_weights: bool = True
) -> Callable[..., Any]:
    """Makes `trace(holes, micro_batches, ...)` take the tensors of batches like this one instead."""
    micro_batches = tuple(tuple((micro_batch.inputs, micro_batch.targets) for micro_batch in own) for own in batch.slices)
    structure = tf.nest.map_structure(lambda leaf: 0, micro_batches)
    count = len(tf.nest.flatten(structure))
    without_weights = () if given_weights else (None,)

    def flat(*tensors: tf.Tensor) -> Any:
        packed = tf.nest.pack_sequence_as(structure, tensors[:count])
        return trace(holes, packed, *without_weights, *tensors[count:])

    return flat


def row(weights: Weights, position: int) -> Weights:
    """The weights of one local replica's slices, shape `[micro_batches]`."""
    return None if weights is None else weights[position]


def _local(strategy: tf.distribute.Strategy, position: int, value: Any) -> Any:
    """One local replica's part of a result; None where replicas return nothing."""
    return None if value is None else strategy.experimental_local_results(value)[position]
