"""Communicator of a TensorFlow process that shares a replica: with its copies, and within the replica."""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf

from isotrain.adapters.common.pipeline.topology import ReplicaTopology
from isotrain.adapters.tensorflow.comm.base import Communicator, in_buckets
from isotrain.plugin import DATA, ProcessContext, ReduceOp, Subgroups, UnsupportedError


class PipelineCommunicator(Communicator):
    """Communicator of a stage or part with its copies, and with the other processes of its replica.

    All collectives are built from those within subgroups of all processes. Transfers name the index of a
    process in the replica.

    Attributes:
        topology: Processes of the replica.
        bucket_bytes: Bucket size in bytes.
        sends_wait: Whether a send may wait for the other process to receive.
    """

    sends_wait = True

    def __init__(self, processes: Communicator, context: ProcessContext, bucket_bytes: int) -> None:
        """Wraps a communicator of processes.

        Args:
            processes: Communicator of all processes of the run, as if each were a replica.
            context: Rank and device mesh of this process.
            bucket_bytes: Bucket size in bytes for gradients.
        """
        mesh, rank = context.device_mesh, context.rank
        self.topology = ReplicaTopology(context)
        self._processes = processes
        self.bucket_bytes = bucket_bytes
        self._all_ranks = (tuple(range(mesh.total_size)),)
        self._same_stage, self._same_replica = mesh.groups(DATA), mesh.groups(mesh.replica_axis)
        self.replicas = mesh.size(DATA)
        self.local_replicas = (mesh.coordinates(rank)[DATA],)
        self._rank = rank

    def all_reduce(self, tensors: Sequence[tf.Tensor], op: ReduceOp) -> list[tf.Tensor]:
        if op == "max":
            return [tf.reduce_max(self.all_gather(tensor), axis=0) for tensor in tensors]
        sums = self._sums(tensors, self._same_stage)
        if op == "sum":
            return sums
        return [total / tf.cast(self.replicas, total.dtype) for total in sums]

    def sum_over_all(self, tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Sums tensors of any shape over all processes. Collective."""
        return self._sums(tensors, self._all_ranks)

    def max_over_all(self, vector: tf.Tensor) -> tf.Tensor:
        """Elementwise maximum of a vector over all processes. Collective."""
        ranks_after = len(self._all_ranks[0]) - self._rank - 1
        rows = tf.pad(vector[tf.newaxis], [[self._rank, ranks_after], [0, 0]])
        return tf.reduce_max(self.sum_over_all([rows])[0], axis=0)

    def sum_in_replica(self, tensor: tf.Tensor) -> tf.Tensor:
        """Sums a tensor of any shape over the processes of this replica. Collective."""
        return self._processes.all_reduce_within(tensor, self._same_replica)

    def _sums(self, tensors: Sequence[tf.Tensor], subgroups: Subgroups) -> list[tf.Tensor]:
        """All-reduces (sum) tensors of any shapes within the subgroups, in buckets. Collective."""

        def add(packed: list[tf.Tensor]) -> list[tf.Tensor]:
            return [self._processes.all_reduce_within(bucket, subgroups) for bucket in packed]

        return in_buckets(tensors, self.bucket_bytes, add)

    def broadcast_from_first(self, tensor: tf.Tensor) -> tf.Tensor:
        """Broadcasts the tensor (any shape) of the first process to all. Collective."""
        return self._broadcast(tensor, self._all_ranks)

    def broadcast_in_replica(self, tensor: tf.Tensor, source: int) -> tf.Tensor:
        """Broadcasts one process's tensor to this replica's other processes. Collective.

        Args:
            tensor: Tensor of the same shape and dtype on every process; only the source's values matter.
            source: Index of the source in the replica.
        """
        first, count = self.topology.first_rank, self.topology.processes
        others = [first + other for other in range(count) if other != source]
        return self._broadcast(tensor, ((first + source, *others),))

    def send(self, tensor: tf.Tensor, destination: int) -> tf.Tensor:
        """Sends a tensor of any shape to another process; returns one to depend on. Point-to-point."""
        return self._broadcast(tensor, ((self._rank, self.topology.first_rank + destination),))

    def receive(self, like: tf.Tensor, source: int) -> tf.Tensor:
        """Receives a tensor of the shape and dtype of `like` from another process. Point-to-point."""
        return self._broadcast(like, ((self.topology.first_rank + source, self._rank),))

    def _broadcast(self, tensor: tf.Tensor, subgroups: Subgroups) -> tf.Tensor:
        """Broadcasts in each subgroup from its first process; bfloat16 as bits: TensorFlow lacks it."""
        if tensor.dtype != tf.bfloat16:
            return self._processes.broadcast_within(tensor, subgroups)
        bits = self._processes.broadcast_within(tf.bitcast(tensor, tf.float16), subgroups)
        return tf.bitcast(bits, tf.bfloat16)

    def all_gather(self, tensor: tf.Tensor) -> tf.Tensor:
        sizes = [tensor.shape.num_elements()] * self.replicas
        flat = tf.reshape(tensor, [-1])
        rows = self._processes.all_gather_shards(flat, sizes, self._same_stage)
        return tf.reshape(rows, [self.replicas, *tensor.shape])

    def send_receive(self, tensor: tf.Tensor, destination: int, source: int) -> tf.Tensor:
        raise _unsupported_collective()

    def all_reduce_within(self, tensor: tf.Tensor, subgroups: Subgroups) -> tf.Tensor:
        raise _unsupported_collective()

    def broadcast_within(self, tensor: tf.Tensor, subgroups: Subgroups) -> tf.Tensor:
        raise _unsupported_collective()

    def close(self) -> None:
        self._processes.close()


class RecordedPipelineCommunicator(PipelineCommunicator):
    """Communicator of a stage over recorded processes."""

    sends_wait = False

    def max_over_all(self, vector: tf.Tensor) -> tf.Tensor:
        return self.sum_over_all([vector])[0]  # the others' numbers would be zeros


def _unsupported_collective() -> UnsupportedError:
    return UnsupportedError(
        "a process that shares a replica with others has no such collective over all of them."
    )
