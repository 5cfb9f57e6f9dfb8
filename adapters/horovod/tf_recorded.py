"""Operations and communicator of Horovod under TensorFlow in a process that stands for all."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from isotrain.adapters.horovod.recorded import RecordedLibrary
from isotrain.adapters.horovod.tf_comm import HorovodCommunicator, sendable
from isotrain.adapters.tensorflow.comm.recorded import all_reduced, as_shards, bytes_of, recorded
from isotrain.plugin import Subgroups, local_subgroup


class RecordedOperations(RecordedLibrary):
    """Horovod's compiled operations, which compute with this process's tensors in place of all others'."""

    def horovod_allreduce(
        self, tensor: tf.Tensor, *, process_set_id: int, **options: Any
    ) -> tf.Tensor:
        """The tensor, of any shape."""
        return all_reduced(tensor, self._process_sets[process_set_id], is_fused=True)

    def horovod_grouped_allreduce(
        self, tensors: Sequence[tf.Tensor], *, process_set_id: int, **options: Any
    ) -> list[tf.Tensor]:
        """The tensors, of any shapes, which Horovod reduces together."""
        nbytes = sum(map(bytes_of, tensors))
        first = recorded(tensors[0], "all-reduce", nbytes, self._process_sets[process_set_id])
        with tf.control_dependencies([first]):
            return [first, *map(tf.identity, tensors[1:])]

    def horovod_allgather(
        self, tensor: tf.Tensor, *, process_set_id: int, **options: Any
    ) -> tf.Tensor:
        """Concatenates copies of a tensor along its first axis."""
        ranks = self._process_sets[process_set_id]
        nbytes = bytes_of(tensor) * len(ranks)
        gathered = recorded(tensor, "all-gather", nbytes, ranks, is_fused=True)
        return tf.concat([gathered] * len(ranks), axis=0)

    def horovod_broadcast(
        self, tensor: tf.Tensor, *, root_rank: int, process_set_id: int, **options: Any
    ) -> tf.Tensor:
        """The tensor, of any shape, if this process sends it; between two processes it is a transfer."""
        ranks = self._process_sets[process_set_id]
        is_transfer, is_root = len(ranks) == 2, root_rank == self._rank
        result = tensor if is_root else tf.zeros_like(tensor)
        if is_transfer and not is_root:
            return result
        kind = "send" if is_transfer else "broadcast"
        return recorded(result, kind, bytes_of(tensor), ranks)

    def horovod_alltoall(
        self, tensor: tf.Tensor, *, splits: tf.Tensor, process_set_id: int, **options: Any
    ) -> tuple[tf.Tensor, tf.Tensor]:
        """Concatenates copies of this process's own rows; and their numbers."""
        ranks = self._process_sets[process_set_id]
        index, nbytes = ranks.index(self._rank), bytes_of(tensor)
        sent = recorded(tensor, "all-to-all", nbytes, ranks)
        first = tf.reduce_sum(splits[:index])
        own = sent[first : first + splits[index]]
        return tf.concat([own] * len(ranks), axis=0), tf.fill([len(ranks)], splits[index])


class RecordedCommunicator(HorovodCommunicator):
    """Communicator that knows what sizes other processes would send."""

    def all_gather_shards(
        self, shard: tf.Tensor, sizes: Sequence[int], subgroups: Subgroups = ()
    ) -> tf.Tensor:
        """Returns parts of this process's own shard."""
        rank = self.replica_index()
        members = local_subgroup(rank, subgroups or [range(self.replicas)])
        if not members:
            return tf.identity(shard)
        gathered = tf.concat(as_shards(shard, sizes), axis=0)
        nbytes = sum(max(1, size) for size in sizes) * sendable(shard).dtype.size
        return recorded(gathered, "all-gather", nbytes, members, is_fused=True)

    def send_receive(self, tensor: tf.Tensor, destination: int, source: int) -> tf.Tensor:
        """Returns this process's own tensor."""
        rank = self.replica_index()
        if destination == rank:
            return tf.identity(tensor)
        return recorded(tensor, "send", bytes_of(sendable(tensor)), (rank, destination))
