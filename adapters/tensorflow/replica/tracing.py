"""What a group's replicas compute: traced once, and called on batches again and again."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import numpy as np
import tensorflow as tf

from isotrain.adapters.keras import model as keras_model
from isotrain.adapters.tensorflow.base.keras_tracing import local_mean_losses, random_streams
from isotrain.adapters.tensorflow.comm.base import Communicator
from isotrain.adapters.tensorflow.trainer.base import MicroBatch, ReplicaTrainer
from isotrain.plugin import Batch, Phase, Weighted

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
        weights = tuple(
            [tuple([micro_batch.weight for micro_batch in own]) for own in batch.slices]
        )
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

    def only_trace(
        self, trace: Callable[[bool, MicroBatches, Weights], None], batch: Batch
    ) -> None:
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
    micro_batches = tuple(
        tuple((micro_batch.inputs, micro_batch.targets) for micro_batch in own)
        for own in batch.slices
    )
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


class TracedMetrics:
    """What a group does with the sums of which metrics consist, one traced function each."""

    def __init__(
        self,
        trainer: ReplicaTrainer,
        traced: TracedFunctions,
        totals: Callable[[Sequence[tf.Tensor]], list[tf.Tensor]],
    ) -> None:
        """Knows no samples yet.

        Args:
            trainer: Has the metrics.
            traced: What traces.
            totals: Gives the sums of tensors over all processes.
        """
        self._trainer = trainer
        self._traced = traced
        self._totals = totals

    def collect(self, phase: Phase) -> dict[str, float]:
        """Gives the means over all samples of all replicas, and starts them anew."""
        function = self._traced.function(("collect", phase), lambda: self._trace_collect(phase))
        found: dict[str, float] = {}
        for name, result in function().items():
            found |= keras_model.named_results(name, result)
        return found

    def _trace_collect(self, phase: Phase) -> dict[str, tf.Tensor]:
        return self._traced.on_replicas(
            lambda position: self._trainer.metrics.collect(phase, self._totals)
        )[0]

    def take(self) -> np.ndarray:
        """Gives the sums of the replicas here, and starts them anew. Local."""
        return np.array(self._traced.function("take metrics", self._trace_take)())

    def _trace_take(self) -> tf.Tensor:
        return tf.add_n(self._traced.on_replicas(lambda position: self._trainer.metrics.take()))

    def add(self, sums: np.ndarray) -> None:
        """Adds what `take` of another process gave. Local."""
        self._traced.function("add metrics", self._trace_add)(tf.constant(sums, tf.float64))

    def _trace_add(self, sums: tf.Tensor) -> None:
        """Adds to the metrics of the first replica here alone."""

        def replica(position: int) -> None:
            own = sums if position == 0 else tf.zeros_like(sums)
            self._trainer.metrics.add(own)

        self._traced.on_replicas(replica)
