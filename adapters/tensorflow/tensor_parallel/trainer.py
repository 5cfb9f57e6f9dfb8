"""Trainer of one part of a tensor-parallel TensorFlow replica of a portable (Keras) model."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import tensorflow as tf

from isotrain.adapters.keras import private as keras_private
from isotrain.adapters.keras.model import LossComputer
from isotrain.adapters.keras.tensor_parallel.cut import Cut
from isotrain.adapters.keras.tensor_parallel.cuts import (
    find_cuts,
    require_portable,
    whole_logits_note,
)
from isotrain.adapters.keras.tensor_parallel.logits import CutLogits
from isotrain.adapters.keras.tensor_parallel.parts import part_bounds
from isotrain.adapters.tensorflow.base.require_all import require_all
from isotrain.adapters.tensorflow.base.variables import value_of
from isotrain.adapters.tensorflow.pipeline.comm import PipelineCommunicator
from isotrain.adapters.tensorflow.trainer.local_shards import (
    LocalShardsTrainer,
    ShardedUpdate,
    VariableShard,
)
from isotrain.adapters.tensorflow.trainer.state import native
from isotrain.plugin import TrainingSpec


class TensorFlowParts:
    """The parts of a replica, as cut layers see them while they are traced.

    Attributes:
        index: Index of this process's part.
        degree: Number of parts.
        numbers_of_max: Numbers that `max` sends for each element of its tensor.
    """

    def __init__(self, communicator: PipelineCommunicator) -> None:
        """Connects to the other parts."""
        topology = communicator.topology
        self.index, self.degree = topology.process, topology.processes
        self.numbers_of_max = self.degree
        self._total = communicator.sum_in_replica

    def copy(self, tensor: tf.Tensor) -> tf.Tensor:
        """The tensor, of any shape; its gradient is the sum of the parts'. Collective."""

        @tf.custom_gradient
        def copied(tensor: tf.Tensor) -> tuple[tf.Tensor, Callable[[tf.Tensor], tf.Tensor]]:
            return tf.identity(tensor), self.sum

        return copied(tensor)

    def sum(self, tensor: tf.Tensor) -> tf.Tensor:
        """Sum of the parts' tensors, of any shape; each gets the gradient of the result. Collective."""

        @tf.custom_gradient
        def summed(tensor: tf.Tensor) -> tuple[tf.Tensor, Callable[[tf.Tensor], tf.Tensor]]:
            return self._total(tensor), self.copy

        return summed(tensor)

    def max(self, tensor: tf.Tensor) -> tf.Tensor:
        """Elementwise maximum of the parts' tensors, of any shape, without gradients. Collective.

        It is that of a sum of rows, one for each part: not every communicator has another reduction.
        """
        rows_after = self.degree - self.index - 1
        padding = [[self.index, rows_after], *[[0, 0]] * tensor.shape.rank]
        rows = tf.pad(tf.stop_gradient(tensor)[tf.newaxis], padding)
        return tf.reduce_max(self._total(rows), axis=0)


class CutWeights:
    """The trainable weights of a model, of some of which this process has a part only.

    Attributes:
        variables: The weights, as variables of Keras.
        shards: This process's part of each, which may be all of it.
    """

    def __init__(
        self,
        trainable: Sequence[Any],
        cuts: Sequence[Cut],
        communicator: PipelineCommunicator,
        parts: TensorFlowParts,
    ) -> None:
        """Keeps this process's part of the weights of layers that are cut. Local.

        Args:
            trainable: Trainable weights, equal on all processes.
            cuts: Layers to cut.
            communicator: Communicator with the other parts of the replica.
            parts: The parts, as the layers see them.
        """
        self.variables = list(trainable)
        self._communicator = communicator
        self.shards = []
        axes = {id(variable): axis for each in cuts for variable, axis in each.axes}
        for variable in trainable:
            full = native(variable)
            shape, offset = tuple(full.shape), None
            if (axis := axes.get(id(variable))) is not None:
                start, length = part_bounds(shape[axis], parts)
                offset = tuple(start if each == axis else 0 for each in range(len(shape)))
                size = [length if each == axis else count for each, count in enumerate(shape)]
                cut = functools.partial(tf.slice, full, offset, size)
                part = tf.Variable(cut, name=variable.name)
                keras_private.replace_value(variable, part)
            self.shards.append(VariableShard(native(variable), shape, offset))
        for each in cuts:
            each.apply(parts)
        self._gathered: Sequence[tf.Variable] = ()

    @property
    def is_unsharded(self) -> bool:
        """Whether this process also has all weights, for reading."""
        return bool(self._gathered)

    @property
    def full_variables(self) -> Sequence[tf.Variable]:
        """The uncut weights, while they are gathered."""
        return self._gathered

    def trace_gather(self) -> list[tf.Tensor]:
        """The uncut values of the weights that are cut, while this is traced. Collective."""
        values = []
        for shard in self.shards:
            if shard.offset is not None:
                part = value_of(shard.local)
                extents = zip(shard.offset, part.shape, shard.shape, strict=True)
                padding = [[start, full - start - size] for start, size, full in extents]
                values.append(self._communicator.sum_in_replica(tf.pad(part, padding)))
        return values

    def keep(self, gathered: Sequence[tf.Tensor]) -> None:
        """Keeps what `trace_gather` returned, for reading; steps go on with parts. Local."""
        values = iter(gathered)
        self._gathered = [
            shard.local if shard.offset is None else tf.Variable(next(values), trainable=False)
            for shard in self.shards
        ]

    def forget(self) -> None:
        """Frees what `keep` has kept. Local."""
        self._gathered = ()

    def norms(self, tensors: Sequence[tf.Tensor], indices: Sequence[int]) -> tf.Tensor:
        """L2 norms of uncut tensors: float64, shape `[tensors]`. Collective.

        Args:
            tensors: This process's parts.
            indices: For each the index of the weight that is cut like it, if at all.
        """
        is_first = self._communicator.topology.process == 0  # it counts what all parts have
        squares = [
            tf.reduce_sum(tf.cast(tensor, tf.float64) ** 2)
            if is_first or self.shards[index].offset is not None
            else tf.zeros((), tf.float64)
            for tensor, index in zip(tensors, indices, strict=True)
        ]
        return tf.sqrt(self._communicator.sum_in_replica(tf.stack(squares)))


class TensorParallelTrainer(LocalShardsTrainer):
    """Trainer of a Keras model, of some weights of which this process has a part.

    Attributes:
        cut_notes: Lines for the plan on what is cut.
    """

    weights: CutWeights
    _logits: CutLogits | None = None

    def __init__(
        self,
        spec: TrainingSpec,
        communicator: PipelineCommunicator,
        layers: Sequence[str] | Mapping[str, str],
    ) -> None:
        """Builds the model, cuts layers, and builds the optimizer and the metrics. Collective.

        Args:
            spec: Training spec.
            communicator: Communicator with the other processes.
            layers: The layers to cut, as `TensorParallelBackend.start_tensor_parallel` gets them.

        Raises:
            SpecError: There is nothing to cut, or there are fewer units, heads or rows than parts.
        """
        self._communicator = communicator
        self._layers = layers
        super().__init__(spec)

    def _update_of(self, spec: TrainingSpec, trainable: list[Any]) -> ShardedUpdate:
        """Cuts the weights first: there are never slots for all of them."""
        model = require_portable(self.model)
        self._broadcast_initial_values()
        parts = TensorFlowParts(self._communicator)
        cuts = find_cuts(model, self._layers, parts, spec, "tensorflow")
        self.weights = CutWeights(trainable, cuts, self._communicator, parts)
        notes = [] if self._layers else whole_logits_note(model, spec, "tensorflow")
        self.cut_notes = [*(each.describe() for each in cuts), *notes]
        if classes := max(each.classes for each in cuts):
            self._logits = CutLogits(spec, classes, parts, require_all)
        return self._update_of_shards(spec)

    def _loss_computer(self, spec: TrainingSpec, training: bool) -> LossComputer:
        computer, logits = super()._loss_computer(spec, training), self._logits
        if logits is None:
            return computer
        for loss in computer.losses.values():
            loss.accuracy = logits.accuracy
        return logits.compute(computer, spec, "tensorflow")

    def predict(self, inputs: Any) -> Any:
        predictions = super().predict(inputs)
        return predictions if self._logits is None else self._logits.gather(predictions)

    def _broadcast_from_first(self, tensor: tf.Tensor) -> tf.Tensor:
        return self._communicator.broadcast_from_first(tensor)
