"""Traced functions of a replica group: traced once, and called on one batch after the other."""

from __future__ import annotations

import contextlib
import functools
import re
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeAlias

import numpy as np
import tensorflow as tf

from isotrain.adapters.common.step_context import of_replicas
from isotrain.adapters.keras import model as keras_model
from isotrain.adapters.tensorflow.base.keras_trace_overrides import (
    local_mean_losses,
    random_streams,
)
from isotrain.adapters.tensorflow.base.require_all import refusal_of
from isotrain.adapters.tensorflow.base.without_values import AbstractFunction, WithoutValues
from isotrain.adapters.tensorflow.comm import recorded
from isotrain.adapters.tensorflow.comm.base import Communicator
from isotrain.adapters.tensorflow.trainer.base import MicroBatch, ReplicaTrainer
from isotrain.plugin import Batch, Phase, SpecError

MicroBatches = tuple[tuple[MicroBatch, ...], ...]
"""Micro-batches of each local replica."""

Weights: TypeAlias = "tf.Tensor | None"
"""Shape `[local replicas, micro_batches]`; None when every weight is 1."""

_CACHED_TENSORS = 256
_EXACT_SHAPES = 8
"""Shapes of inputs for which predictions are traced each, before they are traced for axes of any length."""


class _ShapeRelaxingFunction:
    """A function traced for axes of any length once lengths differ, or for each length where it must know."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        self._traced = tf.function(function, autograph=False, reduce_retracing=True)
        self._is_exact = False

    def __call__(self, *arguments: Any) -> Any:
        try:
            return self._traced(*arguments)
        except (TypeError, ValueError):  # raised while it is traced, so nothing was computed
            if self._is_exact:
                raise
            self._is_exact = True
            self._traced = tf.function(self._function, autograph=False)
            return self._traced(*arguments)


class TracedFunctions:
    """The `tf.function`s of a group, cached by what they compute."""

    def __init__(
        self,
        strategy: tf.distribute.Strategy,
        communicator: Communicator,
        trainer: ReplicaTrainer,
        may_relax_shapes: bool = True,
    ) -> None:
        """Traces nothing yet.

        Args:
            strategy: Strategy of the local replicas.
            communicator: Communicator with all other replicas.
            trainer: Trainer of the local replicas.
            may_relax_shapes: Whether functions may be traced for axes of any length.
        """
        self._may_relax = may_relax_shapes
        self._trainer = trainer
        self._step = trainer.step
        self._strategy = strategy
        self._communicator = communicator
        self._functions: dict[Any, Callable[..., Any]] = {}
        self._predicts_any_shape = False
        self._tensors: dict[Hashable, tf.Tensor] = {}

    def forget(self) -> None:
        """Drops all traced functions: the next call of each traces it anew."""
        self._functions.clear()
        self._tensors.clear()

    def on_batch(
        self, name: str, trace: Callable[..., Any], batch: Batch, *tensors: tf.Tensor
    ) -> Any:
        """Calls the traced form of `trace(has_placeholders, micro_batches, weights, *tensors)` on a batch.

        It is traced anew where weights are needed, and where a micro-batch may be a placeholder. It gets
        a flat list of tensors: nested arguments cost 100 microseconds more in each call. Batches of varying
        widths are traced for axes of any length once a second width comes.
        """
        batch = padded(batch)
        values, varies = self._values(batch, "train"), batch.varying_widths
        if batch.even and len(batch.slices[0]) == 1:
            key = (name, varies, _structure(batch), *batch.values)
            function = self._cached(
                key, lambda: self._flat(trace, False, batch, has_weights=False), varies
            )
            return _call(function, *_leaves(batch), *tensors, *values)
        weights = tuple(
            [tuple([micro_batch.weight for micro_batch in slices]) for slices in batch.slices]
        )
        has_placeholders = any(0.0 in slice_weights for slice_weights in weights)
        key = (name, varies, _structure(batch), len(weights[0]), has_placeholders, *batch.values)
        function = self._cached(key, lambda: self._flat(trace, has_placeholders, batch), varies)
        return _call(function, *_leaves(batch), self.tensor_of(weights), *tensors, *values)

    def on_counts(self, name: str, trace: Callable[..., Any], batch: Batch) -> Any:
        """Calls the traced form of `trace(has_placeholders, micro_batches, counts)` on a batch."""
        batch = padded(batch)
        counts = tuple(
            [tuple([micro_batch.count for micro_batch in slices]) for slices in batch.slices]
        )
        has_placeholders = any(0 in slice_counts for slice_counts in counts)
        varies = batch.varying_widths
        structure = _structure(batch)
        key = (name, varies, structure, len(counts[0]), has_placeholders, *batch.values)
        function = self._cached(key, lambda: self._flat(trace, has_placeholders, batch), varies)
        values = self._values(batch, "evaluation")
        return _call(function, *_leaves(batch), self.tensor_of(counts), *values)

    def on_inputs(self, trace: Callable[[list[Any]], Any], inputs: list[Any]) -> Any:
        """Calls the traced form of `trace(inputs)` on the inputs of each local replica."""
        if self._predicts_any_shape:
            return self._cached("predict any shape", lambda: trace, relaxes_shapes=True)(inputs)
        function = self._cached("predict", lambda: trace)
        outputs = function(inputs)
        self._predicts_any_shape = function.experimental_get_tracing_count() >= _EXACT_SHAPES
        return outputs

    def _values(self, batch: Batch, phase: Phase) -> list[tf.Tensor]:
        """The values of a batch, scalars; then the positions of its slices, if random numbers need them."""
        values = [tf.constant(value, self._step.dtype) for value in batch.values.values()]
        return values + self._step.positions_of(batch, phase)

    def only_trace(
        self, trace: Callable[[bool, MicroBatches, Weights], None], batch: Batch
    ) -> None:
        """Traces `trace(has_placeholders, micro_batches, weights)` for such batches; computes nothing."""
        batch = padded(batch)
        flat = self._flat(trace, False, batch, has_weights=False)
        tensors = [*_leaves(batch), *self._values(batch, "train")]
        tf.function(flat, autograph=False).get_concrete_function(*tensors)

    def _flat(
        self,
        trace: Callable[..., Any],
        has_placeholders: bool,
        batch: Batch,
        has_weights: bool = True,
    ) -> Callable[..., Any]:
        """Makes `trace(has_placeholders, micro_batches, ...)` take the flat tensors of batches like this one.

        The last tensors are those of `_values`, which the step context gets.
        """
        micro_batches = tuple(
            tuple((micro_batch.inputs, micro_batch.targets) for micro_batch in slices)
            for slices in batch.slices
        )
        structure = tf.nest.map_structure(lambda leaf: 0, micro_batches)
        count = len(tf.nest.flatten(structure))
        names, varies = tuple(batch.values), batch.varying_widths
        without_weights = () if has_weights else (None,)

        def flat(*tensors: tf.Tensor) -> Any:
            if self._step.draw_keys is not None:
                tensors, self._step.positions = tensors[:-1], tensors[-1]
            end = len(tensors) - len(names)
            self._step.values = dict(zip(names, tensors[end:], strict=True))
            self._step.varies = varies
            packed = tf.nest.pack_sequence_as(structure, tensors[:count])
            return trace(has_placeholders, packed, *without_weights, *tensors[count:end])

        return flat

    def function(self, key: Any, trace: Callable[..., Any]) -> Callable[..., Any]:
        """The traced form of `trace`; of several with the same key, the first."""
        return self._cached(key, lambda: trace)

    def _cached(
        self, key: Any, make: Callable[[], Callable[..., Any]], relaxes_shapes: bool = False
    ) -> Any:
        """The traced form of the function that `make` returns, cached by key.

        Args:
            key: Hashable description of what the function computes.
            make: Returns the function to trace, if there is none for the key.
            relaxes_shapes: Whether to trace axes of any length once they differ, not each length anew.
        """
        function = self._functions.get(key)
        if function is None:
            if WithoutValues.entered is not None:
                function = AbstractFunction(make(), recorded.note_call)
            elif relaxes_shapes and self._may_relax:
                function = _ShapeRelaxingFunction(make())
            else:
                function = tf.function(make(), autograph=False)
            self._functions[key] = function
        return function

    def on_replicas(self, replica: Callable[[int], Any], trains: bool = False) -> list[Any]:
        """Traces `replica(position)` on each local replica; one result per local replica.

        Args:
            replica: Function of the replica's index among the local ones.
            trains: Whether random numbers must differ between replicas.
        """
        communicator, strategy = self._communicator, self._strategy

        def traced() -> Any:
            self._trainer.use_default_generator()
            return replica(communicator.local_index())

        with contextlib.ExitStack() as contexts:
            contexts.enter_context(self._trainer.frozen_state.watched())
            contexts.enter_context(local_mean_losses())
            if trains:
                contexts.enter_context(random_streams(communicator.replica_index))
            results = strategy.run(traced)
        return [
            tf.nest.map_structure(functools.partial(_local, strategy, position), results)
            for position in range(len(communicator.local_replicas))
        ]

    def tensor_of(self, values: Hashable) -> tf.Tensor:
        """A float64 tensor of a number or of nested tuples of numbers, cached."""
        tensor = self._tensors.get(values)
        if tensor is None:
            if len(self._tensors) >= _CACHED_TENSORS:
                self._tensors.clear()
            tensor = self._tensors[values] = tf.constant(values, tf.float64)
        return tensor


def _call(function: Callable[..., Any], *tensors: tf.Tensor) -> Any:
    """Calls a traced function.

    Raises:
        SpecError: An objective's collective got tensors of several shapes, or a target is no class.
    """
    try:
        return function(*tensors)
    except tf.errors.InvalidArgumentError as error:
        if (refusal := refusal_of(error)) is not None:
            raise refusal from None
        failed = re.search(r"assertion failed: \[(objective: .*)\] \[(\[.*\])\]", error.message)
        if failed is None:
            raise
        text, shapes = failed.groups()
        rows = [f"[{', '.join(re.findall('[0-9]+', row))}]" for row in shapes.split("][")]
        raise SpecError(f"{text} Received {of_replicas(rows)}.") from None


def padded(batch: Batch, slices: int = 0) -> Batch:
    """The batch with equally many slices per local replica, at least `slices`; added ones have no weight."""
    slices = max(slices, *map(len, batch.slices))
    if all(len(each) == slices for each in batch.slices):
        return batch
    rows = (
        (*each, *[replace(each[-1], count=0, weight=0.0)] * (slices - len(each)))
        for each in batch.slices
    )
    return replace(batch, slices=tuple(rows))


def _leaves(batch: Batch) -> list[tf.Tensor]:
    """The tensors of a batch, in a flat list."""
    leaves: list[tf.Tensor] = []
    for slices in batch.slices:
        for micro_batch in slices:
            for part in (micro_batch.inputs, micro_batch.targets):
                if isinstance(part, tf.Tensor):
                    leaves.append(part)
                else:
                    leaves.extend(tf.nest.flatten(part))
    return leaves


def _structure(batch: Batch) -> Any:
    """The structures of inputs and targets, which all slices of a batch share; None for two tensors."""
    inputs, targets = batch.slices[0][0].inputs, batch.slices[0][0].targets
    if isinstance(inputs, tf.Tensor) and isinstance(targets, tf.Tensor):
        return None
    return _structure_of(inputs), _structure_of(targets)


def _structure_of(tree: Any) -> Any:
    if isinstance(tree, Mapping):
        return type(tree), *((key, _structure_of(each)) for key, each in tree.items())
    if isinstance(tree, tuple | list):
        return type(tree), *map(_structure_of, tree)
    return tree is None


def row(weights: Weights, position: int) -> Weights:
    """Weights of one local replica's micro-batches, shape `[micro_batches]`."""
    return None if weights is None else weights[position]


def _local(strategy: tf.distribute.Strategy, position: int, value: Any) -> Any:
    """One local replica's part of a result; None where replicas return None."""
    return None if value is None else strategy.experimental_local_results(value)[position]


class TracedMetrics:
    """Metrics of a group: reads, resets and adds their accumulators, one traced function each."""

    def __init__(
        self,
        trainer: ReplicaTrainer,
        traced: TracedFunctions,
        totals: Callable[[Sequence[tf.Tensor]], list[tf.Tensor]],
    ) -> None:
        """Prepares metrics whose sums are float64 vectors; traces nothing yet.

        Args:
            trainer: Trainer that has the metrics.
            traced: Cache of traced functions.
            totals: Sums tensors over all processes.
        """
        self._trainer = trainer
        self._traced = traced
        self._totals = totals

    def collect(self, phase: Phase) -> dict[str, float]:
        """Means over all samples of all replicas, by metric; resets them. Collective."""
        objective = self._trainer.objective
        names = None if objective is None else objective.names  # known after its first call
        key = ("collect", phase, names)
        function = self._traced.function(key, lambda: self._trace_collect(phase))
        results: dict[str, float] = {}
        for name, value in function().items():
            results |= keras_model.named_results(name, value)
        return results

    def _trace_collect(self, phase: Phase) -> dict[str, tf.Tensor]:
        """Results of a phase's metrics by name, scalars or vectors, from sums over all replicas."""
        return self._traced.on_replicas(
            lambda position: self._trainer.metrics.collect(phase, self._totals)
        )[0]

    def take(self) -> np.ndarray:
        """Sums of the local replicas, a float64 vector; resets them. Local."""
        return np.array(self._traced.function("take metrics", self._trace_take)())

    def _trace_take(self) -> tf.Tensor:
        """Sums of the local replicas, a float64 vector; resets them."""
        return tf.add_n(self._traced.on_replicas(lambda position: self._trainer.metrics.take()))

    def add(self, sums: np.ndarray) -> None:
        """Adds the vector that `take` returned in another process. Local."""
        self._traced.function("add metrics", self._trace_add)(tf.constant(sums, tf.float64))

    def _trace_add(self, sums: tf.Tensor) -> None:
        """Adds a float64 vector to the metrics of the first local replica only."""

        def replica(position: int) -> None:
            added = sums if position == 0 else tf.zeros_like(sums)
            self._trainer.metrics.add(added)

        self._traced.on_replicas(replica)
