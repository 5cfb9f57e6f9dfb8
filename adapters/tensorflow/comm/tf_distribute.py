"""Communicators of the two `tf.distribute` strategies with several replicas."""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from isotrain.adapters.tensorflow.comm.base import StrategyCommunicator
from isotrain.plugin import BackendConfig, ProcessContext, Subgroups, local_subgroup


class MirroredCommunicator(StrategyCommunicator):
    """Communicator of a MirroredStrategy: all replicas live in this process and are traced together."""

    def send_receive(self, tensor: tf.Tensor, destination: int, source: int) -> tf.Tensor:
        return tf.identity(self._local_tensors(tensor)[source])

    def all_reduce_within(self, tensor: tf.Tensor, subgroups: Subgroups) -> tf.Tensor:
        values = self._local_tensors(tensor)
        subgroup = local_subgroup(self.replica_index(), subgroups)
        return (
            tf.add_n([values[replica] for replica in subgroup]) if subgroup else tf.identity(tensor)
        )

    def broadcast_within(self, tensor: tf.Tensor, subgroups: Subgroups) -> tf.Tensor:
        values = self._local_tensors(tensor)
        subgroup = local_subgroup(self.replica_index(), subgroups)
        return tf.identity(values[subgroup[0]] if subgroup else tensor)

    def _local_tensors(self, tensor: tf.Tensor) -> Sequence[tf.Tensor]:
        """Tensors, of one shape, that all local replicas pass here at the same point."""

        def collect(strategy: tf.distribute.Strategy, value: tf.Tensor) -> Sequence[tf.Tensor]:
            return strategy.experimental_local_results(value)

        return tf.distribute.get_replica_context().merge_call(collect, args=(tensor,))


class MultiWorkerCommunicator(StrategyCommunicator):
    """Communicator with one replica per process; TensorFlow's raw collectives serve subgroups."""

    def __init__(
        self, context: ProcessContext, backend_config: BackendConfig, bucket_bytes: int
    ) -> None:
        super().__init__(context.replicas, context.local_replicas, bucket_bytes)
        # Without a timeout: TensorFlow keeps a thread asleep for that long after every collective.
        self._hint = {"communication_hint": backend_config.collective}
        self._graph: Any = None
        self._operations: Counter[Any] = Counter()

    def _keys(self, kind: str, members: tuple[int, ...], tensor: tf.Tensor) -> dict[str, int]:
        """The keys by which TensorFlow matches one collective on a tensor of any shape over its processes.

        They follow from what the operation is and from how many like it the traced graph has so far, so
        that processes that traced other graphs before agree on them.
        """
        graph = tf.compat.v1.get_default_graph()
        if graph is not self._graph:
            self._graph, self._operations = graph, Counter()
        operation = (kind, members, tensor.dtype.name, tuple(tensor.shape))
        self._operations[operation] += 1
        return {
            "group_size": len(members),
            "group_key": _key(members),
            "instance_key": _key(operation, self._operations[operation]),
        }

    def send_receive(self, tensor: tf.Tensor, destination: int, source: int) -> tf.Tensor:
        """Sends a tensor of any shape by two concurrent broadcasts between two replicas. Collective."""
        rank = self.replica_index()
        if destination == source == rank:
            return tf.identity(tensor)
        sent = self._send(tensor, "send", (rank, destination))
        received = self._receive(tensor, "send", (source, rank))
        with tf.control_dependencies([sent]):
            return tf.identity(received)

    def reduce_scatter(
        self, vector: tf.Tensor, sizes: Sequence[int], subgroups: Subgroups = ()
    ) -> tuple[tf.Tensor, tf.Tensor]:
        """Sends every replica its shard of the vector: half of what an all-reduce moves. Collective."""
        shards, members = tf.split(vector, list(sizes)), self._members(subgroups)
        local_shard = shards[members.index(self.replica_index())]
        received = self._all_to_all("reduce-scatter", members, shards, [local_shard] * len(members))
        with tf.control_dependencies(received):
            return tf.add_n(received), tf.ones(())

    def all_gather_shards(
        self, shard: tf.Tensor, sizes: Sequence[int], subgroups: Subgroups = ()
    ) -> tf.Tensor:
        """Every replica sends every other its own shard, a vector. Collective."""
        members = self._members(subgroups)
        like = [tf.zeros(size, shard.dtype) for size in sizes]
        outgoing = [shard] * len(members)
        return tf.concat(self._all_to_all("all-gather", members, outgoing, like), axis=0)

    def _members(self, subgroups: Subgroups) -> tuple[int, ...]:
        """The replicas of this replica's subgroup; without subgroups, all replicas."""
        rank = self.replica_index()
        return (
            (local_subgroup(rank, subgroups) or (rank,))
            if subgroups
            else tuple(range(self.replicas))
        )

    def _all_to_all(
        self,
        kind: str,
        members: tuple[int, ...],
        outgoing: Sequence[tf.Tensor],
        like: Sequence[tf.Tensor],
    ) -> list[tf.Tensor]:
        """All-to-all over some replicas; empty tensors are not sent.

        Args:
            kind: Kind of the collective, for its keys.
            members: Replica indices.
            outgoing: Tensor to send to each member.
            like: Shape and dtype of the tensor to receive from each member.

        Returns:
            The tensor received from each member.
        """
        rank, sent = self.replica_index(), []
        received = [
            outgoing[index] if member == rank else like[index]
            for index, member in enumerate(members)
        ]
        # A receive allocates its memory as soon as it is issued.
        with tf.control_dependencies(outgoing):
            for index, other in enumerate(members):
                if other != rank and outgoing[index].shape[0]:
                    sent.append(self._send(outgoing[index], kind, (rank, other)))
                if other != rank and like[index].shape[0]:
                    received[index] = self._receive(like[index], kind, (other, rank))
        with tf.control_dependencies(sent):
            return [tf.identity(tensor) for tensor in received]

    def _send(self, tensor: tf.Tensor, kind: str, members: tuple[int, ...]) -> tf.Tensor:
        """Sends a tensor of any shape to the other members, as the root of a broadcast."""
        return tf.raw_ops.CollectiveBcastSendV2(
            input=tensor, **self._keys(kind, members, tensor), **self._hint
        )

    def _receive(self, like: tf.Tensor, kind: str, members: tuple[int, ...]) -> tf.Tensor:
        """Receives a tensor of the shape and dtype of `like` from the first member."""
        received = tf.raw_ops.CollectiveBcastRecvV2(
            T=like.dtype, shape=tf.shape(like), **self._keys(kind, members, like), **self._hint
        )
        return tf.ensure_shape(received, like.shape)

    def _reduce(self, tensor: tf.Tensor, members: tuple[int, ...]) -> tf.Tensor:
        """All-reduces (sum) a tensor of any shape over the members."""
        total = tf.raw_ops.CollectiveReduceV2(
            input=tensor,
            ordering_token=[],
            merge_op="Add",
            final_op="Id",
            **self._keys("sum", members, tensor),
            **self._hint,
        )
        return tf.ensure_shape(total, tensor.shape)

    def all_reduce_within(self, tensor: tf.Tensor, subgroups: Subgroups) -> tf.Tensor:
        subgroup = local_subgroup(self.replica_index(), subgroups)
        return self._reduce(tensor, subgroup) if subgroup else tf.identity(tensor)

    def broadcast_within(self, tensor: tf.Tensor, subgroups: Subgroups) -> tf.Tensor:
        rank = self.replica_index()
        subgroup = local_subgroup(rank, subgroups)
        if not subgroup:
            return tf.identity(tensor)
        transfer = self._send if rank == subgroup[0] else self._receive
        return tf.ensure_shape(transfer(tensor, "broadcast", subgroup), tensor.shape)


class ProcessCommunicator(MultiWorkerCommunicator):
    """Communicator over all processes, each as if it were a replica; no strategy knows of them."""

    def __init__(
        self, context: ProcessContext, backend_config: BackendConfig, bucket_bytes: int
    ) -> None:
        super().__init__(context, backend_config, bucket_bytes)
        self.replicas, self.local_replicas = context.world_size, (context.rank,)

    def local_index(self) -> int:
        return 0

    def _sum(self, tensors: list[tf.Tensor]) -> list[tf.Tensor]:
        """All-reduces (sum) tensors of any shapes over all processes. Collective."""
        return [self.all_reduce_within(tensor, (self._members(()),)) for tensor in tensors]

    def all_gather(self, tensor: tf.Tensor) -> tf.Tensor:
        size = tensor.shape.num_elements()
        rows = self.all_gather_shards(tf.reshape(tensor, [-1]), [size] * self.replicas)
        return tf.reshape(rows, [self.replicas, *tensor.shape])


def _key(*facts: Any) -> int:
    """A hash of 31 bits, positive and the same in every process."""
    return zlib.crc32(repr(facts).encode()) >> 1
