"""The `Replica` of TensorFlow, which a strategy's computations get while they are traced."""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf
from keras import ops

from isotrain.adapters.tensorflow.base.variables import value_of
from isotrain.adapters.tensorflow.comm.base import Communicator
from isotrain.adapters.tensorflow.trainer.base import ReplicaTrainer
from isotrain.plugin import ReduceOp, Replica, StatePart, Subgroups, spans_of_range


class TensorFlowReplica(Replica):
    """Reads and writes a trainer's variables; communicates within the graph.

    Attributes:
        keepalive_outputs: Tensors that the traced function must return. Without them, TensorFlow would
            prune a reduce-scatter of which this replica's shard is empty, while others wait for it.
    """

    ops = ops

    def __init__(self, trainer: ReplicaTrainer, communicator: Communicator) -> None:
        self.index = communicator.replica_index()
        self.replicas = communicator.replicas
        self.keepalive_outputs: list[tf.Tensor] = []
        self._trainer = trainer
        self._communicator = communicator

    def read(self, parts: Sequence[StatePart]) -> tf.Tensor:
        variables = self._variables(parts)
        if not variables:
            return tf.zeros(0)
        widest = max((variable.dtype for variable in variables), key=lambda dtype: dtype.size)
        flat = [tf.reshape(tf.cast(value_of(variable), widest), [-1]) for variable in variables]
        return tf.concat(flat, axis=0)

    def write(self, parts: Sequence[StatePart], vector: tf.Tensor) -> None:
        _write(self._variables(parts), vector)

    def read_weights(self, indices: Sequence[int]) -> tf.Tensor:
        weights = self._trainer.part("trainable")
        empty = _empty(weights)
        selected = [tf.cast(value_of(weights[index]), empty.dtype) for index in indices]
        return tf.concat([empty, *(tf.reshape(weight, [-1]) for weight in selected)], axis=0)

    def write_weights(self, indices: Sequence[int], vector: tf.Tensor) -> None:
        weights = self._trainer.part("trainable")
        _write([weights[index] for index in indices], vector)

    def read_range(self, start: int, stop: int) -> tf.Tensor:
        weights = self._trainer.part("trainable")
        parts = [_empty(weights)]
        for index, first, end in spans_of_range(_sizes(weights), start, stop):
            value = tf.reshape(value_of(weights[index]), [-1])[first:end]
            parts.append(tf.cast(value, parts[0].dtype))
        return tf.concat(parts, axis=0)

    def write_range(self, start: int, vector: tf.Tensor) -> None:
        weights = self._trainer.part("trainable")
        sizes = _sizes(weights)
        for index, first, end in spans_of_range(sizes, start, start + vector.shape[0]):
            weight, values, vector = weights[index], vector[: end - first], vector[end - first :]
            if end - first < sizes[index]:
                before = tf.reshape(value_of(weight), [-1])
                values = tf.cast(values, weight.dtype)
                values = tf.concat([before[:first], values, before[end:]], axis=0)
            _write([weight], values)

    def reduce_scatter(self, vector: tf.Tensor, sizes: Sequence[int]) -> tf.Tensor:
        part, proof = self._communicator.reduce_scatter(vector, sizes)
        self.keepalive_outputs.append(proof)
        return part

    def all_gather_shards(self, shard: tf.Tensor, sizes: Sequence[int]) -> tf.Tensor:
        return _must_run(self._communicator.all_gather_shards(shard, sizes))

    def reduce_scatter_within(
        self, vector: tf.Tensor, sizes: Sequence[int], subgroups: Subgroups
    ) -> tf.Tensor:
        part, proof = self._communicator.reduce_scatter(vector, sizes, subgroups)
        self.keepalive_outputs.append(proof)
        return part

    def all_gather_shards_within(
        self, shard: tf.Tensor, sizes: Sequence[int], subgroups: Subgroups
    ) -> tf.Tensor:
        return _must_run(self._communicator.all_gather_shards(shard, sizes, subgroups))

    def values(self, parts: Sequence[StatePart]) -> list[tf.Tensor]:
        """Values of parts of the state, in the shapes of their variables, in order. Local."""
        return [value_of(variable) for variable in self._variables(parts)]

    def _variables(self, parts: Sequence[StatePart]) -> list[tf.Variable]:
        """Variables of parts of the state, any shape, in order."""
        return [variable for part in parts for variable in self._trainer.part(part)]

    def all_reduce(self, tensor: tf.Tensor, op: ReduceOp = "sum") -> tf.Tensor:
        return _must_run(self._communicator.all_reduce([tensor], op)[0])

    def all_gather(self, tensor: tf.Tensor) -> tf.Tensor:
        return _must_run(self._communicator.all_gather(tensor))

    def send_receive(self, tensor: tf.Tensor, destinations: Sequence[int]) -> tf.Tensor:
        source = list(destinations).index(self.index)
        received = self._communicator.send_receive(tensor, destinations[self.index], source)
        return _must_run(received)

    def all_reduce_within(self, tensor: tf.Tensor, subgroups: Subgroups) -> tf.Tensor:
        return _must_run(self._communicator.all_reduce_within(tensor, subgroups))

    def broadcast_within(self, tensor: tf.Tensor, subgroups: Subgroups) -> tf.Tensor:
        return _must_run(self._communicator.broadcast_within(tensor, subgroups))


def _must_run(result: tf.Tensor) -> tf.Tensor:
    """The result of a collective, any shape, which is computed even if this replica does not use it.

    TensorFlow would prune the raw collectives of `tf-multiworker` and Horovod's, which others wait for. A
    stateful operation that takes a part of the result is never pruned, in no branch and loop either.
    """
    tf.raw_ops.Assert(condition=True, data=[tf.reshape(result, [-1])[:1]])
    return result


def _sizes(variables: Sequence[tf.Variable]) -> list[int]:
    """Number of elements of each variable."""
    return [variable.shape.num_elements() for variable in variables]


def _empty(weights: Sequence[tf.Variable]) -> tf.Tensor:
    """Vector of length 0 in the widest dtype of the weights."""
    return tf.zeros(0, max((weight.dtype for weight in weights), key=lambda dtype: dtype.size))


def _write(variables: Sequence[tf.Variable], vector: tf.Tensor) -> None:
    """Assigns the variables, in their shapes and dtypes, the parts of a vector."""
    values = tf.split(vector, _sizes(variables)) if variables else []
    for variable, value in zip(variables, values, strict=True):
        variable.assign(tf.cast(tf.reshape(value, variable.shape), variable.dtype))
