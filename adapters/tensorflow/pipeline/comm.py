"""Communicator of a TensorFlow process of a pipeline run: along the data axis and along the stage axis."""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf

from isotrain.adapters.tensorflow.comm.base import Communicator, in_buckets
from isotrain.plugin import DATA, ProcessContext, ReduceOp, Subgroups, UnsupportedError


class PipelineCommunicator(Communicator):
    """Communicator of a stage with the same stage of other replicas, and with its replica's other stages.

    All collectives are built from two: all-reduce and broadcast within subgroups of all processes. In
    tensor-parallel runs the parts of a replica are its stages.

    Attributes:
        stage: Stage of this process.
        stages: Number of stages.
        bucket_bytes: Bucket size in bytes.
    """

    def __init__(self, processes: Communicator, context: ProcessContext, bucket_bytes: int) -> None:
        """Wraps a communicator of processes.

        Args:
            processes: Communicator of all processes of the run, as if each were a replica.
            context: Rank and device mesh of this process.
            bucket_bytes: Bucket size in bytes for gradients.
        """
        mesh, rank = context.device_mesh, context.rank
        axis = mesh.replica_axis
        self._processes = processes
        self.bucket_bytes = bucket_bytes
        self._all_ranks = (tuple(range(mesh.total_size)),)
        self._same_stage, self._same_replica = mesh.groups(DATA), mesh.groups(axis)
        self.replicas, self.stages = mesh.size(DATA), mesh.size(axis)
        self.local_replicas = (mesh.coordinates(rank)[DATA],)
        self.stage = mesh.coordinates(rank)[axis]
        self._first_rank = rank - self.stage
        self._rank = rank

    def all_reduce(self, tensors: Sequence[tf.Tensor], op: ReduceOp) -> list[tf.Tensor]:
        if op == "max":
            raise _unsupported_collective()
        sums = self._sums(tensors, self._same_stage)
        if op == "sum":
            return sums
        return [total / tf.cast(self.replicas, total.dtype) for total in sums]

    def sum_over_all(self, tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Sums tensors of any shape over all stages of all replicas. Collective."""
        return self._sums(tensors, self._all_ranks)

    def max_over_all(self, vector: tf.Tensor) -> tf.Tensor:
        """Elementwise maximum of a vector over all stages of all replicas. Collective."""
        ranks_after = len(self._all_ranks[0]) - self._rank - 1
        rows = tf.pad(vector[tf.newaxis], [[self._rank, ranks_after], [0, 0]])
        return tf.reduce_max(self.sum_over_all([rows])[0], axis=0)

    def sum_over_stages(self, tensor: tf.Tensor) -> tf.Tensor:
        """Sums a tensor of any shape over the stages of this replica. Collective."""
        return self._processes.all_reduce_within(tensor, self._same_replica)

    def _sums(self, tensors: Sequence[tf.Tensor], subgroups: Subgroups) -> list[tf.Tensor]:
        """All-reduces (sum) tensors of any shapes within the subgroups, in buckets. Collective."""

        def add(packed: list[tf.Tensor]) -> list[tf.Tensor]:
            return [self._processes.all_reduce_within(bucket, subgroups) for bucket in packed]

        return in_buckets(tensors, self.bucket_bytes, add)

    def broadcast_from_first(self, tensor: tf.Tensor) -> tf.Tensor:
        """Broadcasts the tensor (any shape) of the first process to all. Collective."""
        return self._broadcast(tensor, self._all_ranks)

    def broadcast_from_stage(self, tensor: tf.Tensor, stage: int) -> tf.Tensor:
        """Broadcasts one stage's tensor to this replica's other stages. Collective.

        Args:
            tensor: Tensor of the same shape and dtype on every stage; only the source's values matter.
            stage: Source stage.
        """
        source = self._first_rank + stage
        others = [self._first_rank + other for other in range(self.stages) if other != stage]
        return self._broadcast(tensor, ((source, *others),))

    def send(self, tensor: tf.Tensor, stage: int) -> tf.Tensor:
        """Sends a tensor of any shape to another stage; returns one to depend on. Point-to-point."""
        return self._broadcast(tensor, ((self._rank, self._first_rank + stage),))

    def receive(self, like: tf.Tensor, stage: int) -> tf.Tensor:
        """Receives a tensor of the shape and dtype of `like` from another stage. Point-to-point."""
        return self._broadcast(like, ((self._first_rank + stage, self._rank),))

    def _broadcast(self, tensor: tf.Tensor, subgroups: Subgroups) -> tf.Tensor:
        """Broadcasts in each subgroup from its first process; bfloat16 as bits: TensorFlow lacks it."""
        if tensor.dtype != tf.bfloat16:
            return self._processes.broadcast_within(tensor, subgroups)
        bits = self._processes.broadcast_within(tf.bitcast(tensor, tf.float16), subgroups)
        return tf.bitcast(bits, tf.bfloat16)

    def all_gather(self, tensor: tf.Tensor) -> tf.Tensor:
        raise _unsupported_collective()

    def send_receive(self, tensor: tf.Tensor, destination: int, source: int) -> tf.Tensor:
        raise _unsupported_collective()

    def all_reduce_within(self, tensor: tf.Tensor, subgroups: Subgroups) -> tf.Tensor:
        raise _unsupported_collective()

    def broadcast_within(self, tensor: tf.Tensor, subgroups: Subgroups) -> tf.Tensor:
        raise _unsupported_collective()

    def close(self) -> None:
        self._processes.close()


def _unsupported_collective() -> UnsupportedError:
    return UnsupportedError(
        "a pipeline stage has no such collective: it sends to and receives from other stages."
    )
