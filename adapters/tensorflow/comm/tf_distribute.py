"""What the two `tf.distribute` strategies of several replicas exchange each in their own way."""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from isotrain.adapters.tensorflow.comm.base import StrategyCommunicator
from isotrain.plugin import BackendConfig, ProcessContext, Subgroups, local_subgroup


class MirroredCommunicator(StrategyCommunicator):
    """All replicas live in this process, which sees the tensors of all while it traces."""

    def send_receive(self, tensor: tf.Tensor, destination: int, source: int) -> tf.Tensor:
        return tf.identity(self._of_all(tensor)[source])

    def all_reduce_within(self, tensor: tf.Tensor, subgroups: Subgroups) -> tf.Tensor:
        values = self._of_all(tensor)
        part = local_subgroup(self.replica_index(), subgroups)
        return tf.add_n([values[replica] for replica in part]) if part else tf.identity(tensor)

    def broadcast_within(self, tensor: tf.Tensor, subgroups: Subgroups) -> tf.Tensor:
        values = self._of_all(tensor)
        part = local_subgroup(self.replica_index(), subgroups)
        return tf.identity(values[part[0]] if part else tensor)

    def _of_all(self, tensor: tf.Tensor) -> Sequence[tf.Tensor]:
        def collect(strategy: tf.distribute.Strategy, value: tf.Tensor) -> Sequence[tf.Tensor]:
            return strategy.experimental_local_results(value)

        return tf.distribute.get_replica_context().merge_call(collect, args=(tensor,))


class MultiWorkerCommunicator(StrategyCommunicator):
    """One replica in each process: TensorFlow's own collective operations, between some of them."""

    def __init__(
        self, context: ProcessContext, backend_config: BackendConfig, bucket_bytes: int
    ) -> None:
        super().__init__(context.replicas, context.local_replicas, bucket_bytes)
        self._hint = {
            "communication_hint": backend_config.collective,
            "timeout_seconds": backend_config.timeout,
        }
        self._graph: Any = None
        self._operations: Counter[Any] = Counter()

    def _keys(self, kind: str, members: tuple[int, ...], tensor: tf.Tensor) -> dict[str, int]:
        """The keys by which TensorFlow pairs one operation over its processes.

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
        """Two broadcasts among two replicas, both under way at once: each waits for its other end."""
        own = self.replica_index()
        if destination == source == own:
            return tf.identity(tensor)
        sent = self._send(tensor, self._keys("send", (own, destination), tensor))
        received = self._receive(tensor, self._keys("send", (source, own), tensor))
        with tf.control_dependencies([sent]):
            return tf.identity(received)

    def reduce_scatter(
        self, vector: tf.Tensor, sizes: Sequence[int], subgroups: Subgroups = ()
    ) -> tuple[tf.Tensor, tf.Tensor]:
        """Each sends every other its part: half of what an all-reduce moves."""
        parts, members = tf.split(vector, list(sizes)), self._members(subgroups)
        own = parts[members.index(self.replica_index())]
        received = self._exchanged("sum parts", members, parts, [own] * len(members))
        with tf.control_dependencies(received):
            return tf.add_n(received), tf.ones(())

    def all_gather_shards(
        self, shard: tf.Tensor, sizes: Sequence[int], subgroups: Subgroups = ()
    ) -> tf.Tensor:
        """Each sends every other its own."""
        members = self._members(subgroups)
        like = [tf.zeros(size, shard.dtype) for size in sizes]
        given = [shard] * len(members)
        return tf.concat(self._exchanged("join parts", members, given, like), axis=0)

    def _members(self, subgroups: Subgroups) -> tuple[int, ...]:
        """The replicas of the own set; without any, all."""
        own = self.replica_index()
        return (
            (local_subgroup(own, subgroups) or (own,)) if subgroups else tuple(range(self.replicas))
        )

    def _exchanged(
        self,
        kind: str,
        members: tuple[int, ...],
        given: Sequence[tf.Tensor],
        like: Sequence[tf.Tensor],
    ) -> list[tf.Tensor]:
        """Sends each of some replicas a tensor, and gives those that came; empty ones do not travel."""
        own, sent = self.replica_index(), []
        found = [given[i] if r == own else like[i] for i, r in enumerate(members)]
        with tf.control_dependencies(given):  # what is to come takes memory once it is asked for
            for place, other in enumerate(members):
                if other != own and given[place].shape[0]:
                    keys = self._keys(kind, (own, other), given[place])
                    sent.append(self._send(given[place], keys))
                if other != own and like[place].shape[0]:
                    keys = self._keys(kind, (other, own), like[place])
                    found[place] = self._receive(like[place], keys)
        with tf.control_dependencies(sent):
            return [tf.identity(tensor) for tensor in found]

    def _send(self, tensor: tf.Tensor, keys: dict[str, int]) -> tf.Tensor:
        return tf.raw_ops.CollectiveBcastSendV2(input=tensor, **keys, **self._hint)

    def _receive(self, like: tf.Tensor, keys: dict[str, int]) -> tf.Tensor:
        received = tf.raw_ops.CollectiveBcastRecvV2(
            T=like.dtype, shape=tf.shape(like), **keys, **self._hint
        )
        return tf.ensure_shape(received, like.shape)

    def all_reduce_within(self, tensor: tf.Tensor, subgroups: Subgroups) -> tf.Tensor:
        def add(keys: dict[str, int], root: int) -> tf.Tensor:
            return tf.raw_ops.CollectiveReduceV2(
                input=tensor, ordering_token=[], merge_op="Add", final_op="Id", **keys, **self._hint
            )

        return self._within("sum", tensor, subgroups, add)

    def broadcast_within(self, tensor: tf.Tensor, subgroups: Subgroups) -> tf.Tensor:
        def share(keys: dict[str, int], root: int) -> tf.Tensor:
            own = self.replica_index() == root
            return self._send(tensor, keys) if own else self._receive(tensor, keys)

        return self._within("broadcast", tensor, subgroups, share)

    def _within(
        self,
        kind: str,
        tensor: tf.Tensor,
        subgroups: Subgroups,
        operation: Callable[[dict[str, int], int], tf.Tensor],
    ) -> tf.Tensor:
        part = local_subgroup(self.replica_index(), subgroups)
        if not part:
            return tf.identity(tensor)
        return tf.ensure_shape(operation(self._keys(kind, part, tensor), part[0]), tensor.shape)


class ProcessCommunicator(MultiWorkerCommunicator):
    """Exchanges within parts of all processes, each as if it were a replica; no strategy knows of them."""

    def __init__(
        self, context: ProcessContext, backend_config: BackendConfig, bucket_bytes: int
    ) -> None:
        super().__init__(context, backend_config, bucket_bytes)
        self.replicas, self.local_replicas = context.world_size, (context.rank,)

    def local_index(self) -> int:
        return 0

    def _sum(self, tensors: list[tf.Tensor]) -> list[tf.Tensor]:
        return [self.all_reduce_within(tensor, (self._members(()),)) for tensor in tensors]

    def all_gather(self, tensor: tf.Tensor) -> tf.Tensor:
        size = tensor.shape.num_elements()
        rows = self.all_gather_shards(tf.reshape(tensor, [-1]), [size] * self.replicas)
        return tf.reshape(rows, [self.replicas, *tensor.shape])


def _key(*facts: Any) -> int:
    """A positive number of 31 bits, the same in every process."""
    return zlib.crc32(repr(facts).encode()) >> 1
