"""Collectives of a TensorFlow replica: the communicator interface, and its form over tf.distribute."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from isotrain.plugin import ReduceOp, Subgroups, index_within


class Communicator(ABC):
    """Collectives of the replicas of one process with all others.

    All methods but `close` are called while a `tf.function` is traced, within a replica, by every replica
    at the same point.

    Attributes:
        replicas: Number of replicas in the run.
        local_replicas: Indices of the replicas in this process.
    """

    replicas: int
    local_replicas: tuple[int, ...]

    def local_index(self) -> int:
        """Index of the replica that is being traced among the local replicas. Local."""
        return 0

    def replica_index(self) -> int:
        """Index of the replica that is being traced among all replicas. Local."""
        return self.local_replicas[self.local_index()]

    @abstractmethod
    def all_reduce(self, tensors: Sequence[tf.Tensor], op: ReduceOp) -> list[tf.Tensor]:
        """Reduces each tensor, any shape, over all replicas; small ones travel together. Collective."""

    def sum(self, tensor: tf.Tensor) -> tf.Tensor:
        """Sums a tensor over all replicas, any shape, one of several at a time. Collective."""
        return self.all_reduce([tensor], "sum")[0]

    @abstractmethod
    def all_gather(self, tensor: tf.Tensor) -> tf.Tensor:
        """Stacks the tensors of all replicas: shape `[replicas, *shape]`. Collective."""

    def reduce_scatter(
        self, vector: tf.Tensor, sizes: Sequence[int], subgroups: Subgroups = ()
    ) -> tuple[tf.Tensor, tf.Tensor]:
        """Reduce-scatter over all replicas, or over this replica's subgroup. Collective.

        Args:
            vector: Vector, shape `[sum(sizes)]`.
            sizes: Length of each replica's shard of the sum.
            subgroups: Subgroups; empty: all replicas.

        Returns:
            This replica's shard, which may be empty; and a non-empty tensor that depends on the collective.
        """
        if subgroups:
            total = self.all_reduce_within(vector, subgroups)
            index = index_within(self.replica_index(), subgroups)
        else:
            total, index = self.all_reduce([vector], "sum")[0], self.replica_index()
        return tf.split(total, sizes)[index], total[:1]

    def all_gather_shards(
        self, shard: tf.Tensor, sizes: Sequence[int], subgroups: Subgroups = ()
    ) -> tf.Tensor:
        """All-gather of shards of different lengths, over all replicas or one subgroup. Collective.

        Args:
            shard: This replica's shard, a vector.
            sizes: Length of each replica's shard.
            subgroups: Subgroups; empty: all replicas.

        Returns:
            The concatenated shards, shape `[sum(sizes)]`.
        """
        if subgroups:
            index = index_within(self.replica_index(), subgroups)
            padding = [[sum(sizes[:index]), sum(sizes[index + 1 :])]]
            # negative zeros, which change no bit of what they are added to
            padded = tf.pad(shard, padding, constant_values=tf.cast(-0.0, shard.dtype))
            return self.all_reduce_within(padded, subgroups)
        if len(set(sizes)) == 1:
            return tf.reshape(self.all_gather(shard), [-1])
        rows = self.all_gather(tf.pad(shard, [[0, max(sizes) - sizes[self.replica_index()]]]))
        return tf.concat([rows[index, :size] for index, size in enumerate(sizes)], axis=0)

    @abstractmethod
    def send_receive(self, tensor: tf.Tensor, destination: int, source: int) -> tf.Tensor:
        """Sends to one replica while receiving a tensor of equal shape and dtype from another. Collective."""

    @abstractmethod
    def all_reduce_within(self, tensor: tf.Tensor, subgroups: Subgroups) -> tf.Tensor:
        """Sums a tensor, any shape, in each subgroup; a replica in none keeps its own. Collective."""

    @abstractmethod
    def broadcast_within(self, tensor: tf.Tensor, subgroups: Subgroups) -> tf.Tensor:
        """Broadcasts a tensor, any shape, in each subgroup from its first replica. Collective.

        A replica in no subgroup keeps its own tensor.
        """

    def close(self) -> None:
        """Leaves the group of replicas; called by every process, outside of any `tf.function`."""
        return None


class SingleReplicaCommunicator(Communicator):
    """The null object: one replica, no strategy, no server, no port."""

    replicas = 1

    def __init__(self, replica: int = 0) -> None:
        """Takes the index of the only replica.

        Args:
            replica: Replica index, which determines the random numbers that are drawn.
        """
        self.local_replicas = (replica,)

    def all_reduce(self, tensors: Sequence[tf.Tensor], op: ReduceOp) -> list[tf.Tensor]:
        return list(tensors)

    def all_gather(self, tensor: tf.Tensor) -> tf.Tensor:
        return tf.expand_dims(tensor, 0)

    def send_receive(self, tensor: tf.Tensor, destination: int, source: int) -> tf.Tensor:
        return tf.identity(tensor)

    def all_reduce_within(self, tensor: tf.Tensor, subgroups: Subgroups) -> tf.Tensor:
        return tf.identity(tensor)

    def broadcast_within(self, tensor: tf.Tensor, subgroups: Subgroups) -> tf.Tensor:
        return tf.identity(tensor)


class StrategyCommunicator(Communicator):
    """Communicator over the native all-reduce of a `tf.distribute` strategy."""

    def __init__(self, replicas: int, local_replicas: tuple[int, ...], bucket_bytes: int) -> None:
        """Sets the replicas and the bucket size.

        Args:
            replicas: Number of replicas in the run.
            local_replicas: Indices of the replicas in this process.
            bucket_bytes: Bucket size in bytes; tensors below half of it are packed into buckets.
        """
        self.replicas = replicas
        self.local_replicas = local_replicas
        self._bucket_bytes = bucket_bytes
        # One pack per tensor it is given: the tensors are buckets already.
        self._options = tf.distribute.experimental.CommunicationOptions(bytes_per_pack=1)

    def local_index(self) -> int:
        context = tf.distribute.get_replica_context()
        replica = int(tf.get_static_value(context.replica_id_in_sync_group))
        return self.local_replicas.index(replica)

    def all_reduce(self, tensors: Sequence[tf.Tensor], op: ReduceOp) -> list[tf.Tensor]:
        if op == "max":
            return [tf.reduce_max(self.all_gather(tensor), axis=0) for tensor in tensors]
        sums = in_buckets(tensors, self._bucket_bytes, self._sum)
        if op == "sum":
            return sums
        return [total / tf.cast(self.replicas, total.dtype) for total in sums]

    def _sum(self, tensors: list[tf.Tensor]) -> list[tf.Tensor]:
        """Native all-reduce (sum) of tensors of any shapes. Collective."""
        context = tf.distribute.get_replica_context()
        return context.all_reduce(tf.distribute.ReduceOp.SUM, tensors, self._options)

    def all_gather(self, tensor: tf.Tensor) -> tf.Tensor:
        context = tf.distribute.get_replica_context()
        gathered = context.all_gather(tf.expand_dims(tensor, 0), axis=0)
        return tf.ensure_shape(gathered, [self.replicas, *tensor.shape])


def in_buckets(
    tensors: Sequence[tf.Tensor],
    bucket_bytes: int,
    reduce: Callable[[list[tf.Tensor]], list[tf.Tensor]],
) -> list[tf.Tensor]:
    """Reduces tensors that are first packed, by dtype, into flat buckets.

    Args:
        tensors: Tensors of any dtypes and static shapes.
        bucket_bytes: Bucket size in bytes; a bucket is closed before it would exceed it.
        reduce: Reduces a list of tensors elementwise.
    """
    buckets = plan_buckets(tensors, bucket_bytes)
    packed = [_packed([tensors[index] for index in bucket]) for bucket in buckets]
    results: list[Any] = [None] * len(tensors)
    for bucket, reduced in zip(buckets, reduce(packed), strict=True):
        parts = _unpacked(reduced, [tensors[index] for index in bucket])
        for index, part in zip(bucket, parts, strict=True):
            results[index] = part
    return results


def plan_buckets(tensors: Sequence[tf.Tensor], bucket_bytes: int) -> list[list[int]]:
    """Groups the indices of tensors, of any shapes, into buckets of one dtype, in order.

    A tensor of half a bucket or more, or of unknown size, is a bucket of its own: it is not copied. The
    smaller ones between them share buckets.
    """
    buckets: list[list[int]] = []
    open_buckets: dict[tf.DType, tuple[list[int], int]] = {}
    for index, tensor in enumerate(tensors):
        count = tensor.shape.num_elements()
        size = bucket_bytes if count is None else count * tensor.dtype.size
        if 2 * size >= bucket_bytes:
            buckets.append([index])
            continue
        bucket, filled = open_buckets.get(tensor.dtype, ([], bucket_bytes))
        if filled + size > bucket_bytes:
            bucket, filled = [], 0
            buckets.append(bucket)
        bucket.append(index)
        open_buckets[tensor.dtype] = (bucket, filled + size)
    return buckets


def _packed(tensors: list[tf.Tensor]) -> tf.Tensor:
    """Tensors of one dtype, flattened and concatenated to a vector."""
    flat = [tf.reshape(tensor, [-1]) for tensor in tensors]
    return flat[0] if len(flat) == 1 else tf.concat(flat, axis=0)


def _unpacked(bucket: tf.Tensor, tensors: list[tf.Tensor]) -> list[tf.Tensor]:
    """Inverse of `_packed`: parts of the vector `bucket` in the shapes of the tensors."""
    if len(tensors) == 1:
        return [tf.reshape(bucket, tf.shape(tensors[0]))]
    flat = tf.split(bucket, [tensor.shape.num_elements() for tensor in tensors])
    return [tf.reshape(part, tensor.shape) for part, tensor in zip(flat, tensors, strict=True)]
