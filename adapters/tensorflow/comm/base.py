"""How a TensorFlow replica exchanges with the others: the contract, and its form over tf.distribute."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from isotrain.plugin import ReduceOp, Subgroups, index_within


class Communicator(ABC):
    """The ties of the replicas of one process to all others.

    All but `close` are called while a `tf.function` is traced, within a replica, by every replica
    at the same point.

    Attributes:
        replicas: Replicas in the run.
        local_replicas: The indices of those in this process.
    """

    replicas: int
    local_replicas: tuple[int, ...]

    def local_index(self) -> int:
        """Which of the local replicas is being traced, from 0."""
        return 0

    def replica_index(self) -> int:
        """The index of the replica that is being traced."""
        return self.local_replicas[self.local_index()]

    @abstractmethod
    def all_reduce(self, tensors: Sequence[tf.Tensor], op: ReduceOp) -> list[tf.Tensor]:
        """Reduces each tensor over all replicas; many small ones cost little more than one."""

    @abstractmethod
    def all_gather(self, tensor: tf.Tensor) -> tf.Tensor:
        """Stacks the tensors of all replicas: shape `[replicas, *shape]`."""

    def reduce_scatter(
        self, vector: tf.Tensor, sizes: Sequence[int], subgroups: Subgroups = ()
    ) -> tuple[tf.Tensor, tf.Tensor]:
        """Sums a vector over all replicas, or those of the own set, each of which gets its part.

        Returns:
            The part, which may be empty; and a tensor that is not, and that only the exchange gives.
        """
        if subgroups:
            total, place = (
                self.all_reduce_within(vector, subgroups),
                index_within(self.replica_index(), subgroups),
            )
        else:
            total, place = self.all_reduce([vector], "sum")[0], self.replica_index()
        return tf.split(total, sizes)[place], total[:1]

    def all_gather_shards(
        self, shard: tf.Tensor, sizes: Sequence[int], subgroups: Subgroups = ()
    ) -> tf.Tensor:
        """Joins the parts of all replicas, or those of the own set, into one vector."""
        if subgroups:
            place = index_within(self.replica_index(), subgroups)
            filled = tf.pad(shard, [[sum(sizes[:place]), sum(sizes[place + 1 :])]])
            return self.all_reduce_within(filled, subgroups)
        rows = self.all_gather(tf.pad(shard, [[0, max(sizes) - sizes[self.replica_index()]]]))
        return tf.concat([rows[place, :size] for place, size in enumerate(sizes)], axis=0)

    @abstractmethod
    def send_receive(self, tensor: tf.Tensor, destination: int, source: int) -> tf.Tensor:
        """Sends to one replica while receiving a tensor of equal shape from another."""

    @abstractmethod
    def all_reduce_within(self, tensor: tf.Tensor, subgroups: Subgroups) -> tf.Tensor:
        """Sums over the replicas of each part; one that is in no part keeps its own."""

    @abstractmethod
    def broadcast_within(self, tensor: tf.Tensor, subgroups: Subgroups) -> tf.Tensor:
        """Gives each part the tensor of its first replica."""

    def close(self) -> None:
        """Leaves the group of replicas; called by every process, outside of any function."""
        return None


class SingleReplicaCommunicator(Communicator):
    """The null object: one replica, no strategy, no server, no port."""

    replicas = 1

    def __init__(self, replica: int = 0) -> None:
        """Is alone as this replica, whose random numbers it draws."""
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
    """Exchanges with the native all-reduce of a `tf.distribute` strategy."""

    def __init__(self, replicas: int, local_replicas: tuple[int, ...], bucket_bytes: int) -> None:
        """Ties replicas together.

        Args:
            replicas: In the run.
            local_replicas: Indices of those in this process.
            bucket_bytes: Tensors below this size are joined into buckets of this size.
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
        context = tf.distribute.get_replica_context()
        return context.all_reduce(tf.distribute.ReduceOp.SUM, tensors, self._options)

    def all_gather(self, tensor: tf.Tensor) -> tf.Tensor:
        context = tf.distribute.get_replica_context()
        return context.all_gather(tf.expand_dims(tensor, 0), axis=0)


def in_buckets(
    tensors: Sequence[tf.Tensor],
    bucket_bytes: int,
    reduce: Callable[[list[tf.Tensor]], list[tf.Tensor]],
) -> list[tf.Tensor]:
    """Reduces tensors that are first joined, by type, into flat buckets.

    Args:
        tensors: Of any types and static shapes.
        bucket_bytes: A bucket is closed before it would exceed this.
        reduce: Reduces a list of tensors elementwise.
    """
    buckets = plan_buckets(tensors, bucket_bytes)
    packed = [_packed([tensors[i] for i in bucket]) for bucket in buckets]
    results: list[Any] = [None] * len(tensors)
    for bucket, whole in zip(buckets, reduce(packed), strict=True):
        parts = _unpacked(whole, [tensors[i] for i in bucket])
        for index, part in zip(bucket, parts, strict=True):
            results[index] = part
    return results


def plan_buckets(tensors: Sequence[tf.Tensor], bucket_bytes: int) -> list[list[int]]:
    """Groups the indices of the tensors into buckets, in order.

    Tensors of half a bucket and more, and of unknown size, stay alone: they are not copied, and those
    between them go together.
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
    flat = [tf.reshape(tensor, [-1]) for tensor in tensors]
    return flat[0] if len(flat) == 1 else tf.concat(flat, axis=0)


def _unpacked(whole: tf.Tensor, tensors: list[tf.Tensor]) -> list[tf.Tensor]:
    if len(tensors) == 1:
        return [tf.reshape(whole, tf.shape(tensors[0]))]
    flat = tf.split(whole, [tensor.shape.num_elements() for tensor in tensors])
    return [tf.reshape(part, tensor.shape) for part, tensor in zip(flat, tensors, strict=True)]
