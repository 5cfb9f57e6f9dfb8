"""Collectives of TensorFlow replicas of which one process stands for all: it records them, and sends nothing.

They are recorded when they are computed, since a traced function may compute one several times, or never.
Without values, where functions are traced and not run, those of a function's own graph are recorded.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import tensorflow as tf

from isotrain.adapters.tensorflow.base.without_values import MissingValueError, WithoutValues
from isotrain.adapters.tensorflow.comm.tf_distribute import (
    MirroredCommunicator,
    MultiWorkerCommunicator,
    ProcessCommunicator,
)
from isotrain.plugin import Message, Subgroups, local_subgroup

_messages: list[Message] = []
_traced: weakref.WeakKeyDictionary[Any, list[Message]] = weakref.WeakKeyDictionary()
"""Messages of the operations in a graph, where they are not recorded as they are computed."""


@contextlib.contextmanager
def recorded_messages() -> Iterator[Sequence[Message]]:
    """Context that gives what this process would have sent since it was entered. Local."""
    _messages.clear()
    yield _messages


def recorded(
    tensor: tf.Tensor, kind: str, nbytes: int, ranks: Sequence[int], is_fused: bool = False
) -> tf.Tensor:
    """The tensor, any shape; computing it records a message with these fields. Local."""
    message = Message(kind, nbytes, tuple(ranks), is_fused)
    if WithoutValues.entered is not None:
        _traced.setdefault(tf.compat.v1.get_default_graph(), []).append(message)
        return tf.identity(tensor)

    def note() -> int:
        _messages.append(message)
        return 0

    with tf.control_dependencies([tf.py_function(note, [], tf.int64)]):
        return tf.identity(tensor)


def note_call(graph: Any) -> None:
    """Records what a call of a traced function with a graph sends, without values. Local.

    Raises:
        MissingValueError: That depends on values, as in a loop or a branch.
    """
    for other in _traced:
        while (other := getattr(other, "outer_graph", None)) is not None:
            if other is graph:
                raise MissingValueError("collectives are in a loop, a branch or a tf.function")
    _messages.extend(_traced.get(graph, ()))


def all_reduced(tensor: tf.Tensor, ranks: Sequence[int], is_fused: bool = False) -> tf.Tensor:
    """The tensor, any shape, with a recorded all-reduce, and one more of its gradient. Local."""

    @tf.custom_gradient
    def reduce(value: tf.Tensor) -> tuple[tf.Tensor, object]:
        result = recorded(value, "all-reduce", bytes_of(value), ranks, is_fused)
        return result, lambda gradient: all_reduced(gradient, ranks, is_fused)

    return reduce(tensor)


def bytes_of(tensor: tf.Tensor) -> int:
    """Bytes of a tensor of known shape."""
    return int(tensor.shape.num_elements() * tensor.dtype.size)


def as_shards(vector: tf.Tensor, sizes: Sequence[int]) -> list[tf.Tensor]:
    """Vectors of other sizes, each with the first elements of this one, and zeros."""
    padded = tf.pad(vector, [[0, max(sizes)]])
    return [padded[:size] for size in sizes]


class _RecordedTransfers(MultiWorkerCommunicator):
    """Communicator whose raw collectives are recorded; it computes with its own tensors for all others'."""

    def local_index(self) -> int:
        return 0

    def send_receive(self, tensor: tf.Tensor, destination: int, source: int) -> tf.Tensor:
        rank = self.replica_index()
        if destination == rank:
            return tf.identity(tensor)
        return self._send(tensor, "send", (rank, destination))

    def _all_to_all(
        self,
        kind: str,
        members: tuple[int, ...],
        outgoing: Sequence[tf.Tensor],
        like: Sequence[tf.Tensor],
    ) -> list[tf.Tensor]:
        rank = self.replica_index()
        sent = [
            self._send(tensor, kind, (rank, other))
            for tensor, other in zip(outgoing, members, strict=True)
            if other != rank and tensor.shape[0]
        ]
        with tf.control_dependencies(sent):
            own = tf.identity(outgoing[members.index(rank)])
        return as_shards(own, [tensor.shape[0] for tensor in like])

    def _send(self, tensor: tf.Tensor, kind: str, members: tuple[int, ...]) -> tf.Tensor:
        name = "send" if len(members) == 2 else "broadcast"
        return recorded(tensor, name, bytes_of(tensor), members)

    def _receive(self, like: tf.Tensor, kind: str, members: tuple[int, ...]) -> tf.Tensor:
        received = tf.identity(like)
        is_transfer = len(members) == 2
        return received if is_transfer else recorded(received, "broadcast", bytes_of(like), members)

    def _reduce(self, tensor: tf.Tensor, members: tuple[int, ...]) -> tf.Tensor:
        return all_reduced(tensor, members)


class RecordedCommunicator(_RecordedTransfers):
    """Communicator of a replica under a MultiWorkerMirroredStrategy, recorded."""

    def _sum(self, tensors: list[tf.Tensor]) -> list[tf.Tensor]:
        return [self._reduce(tensor, self._members(())) for tensor in tensors]

    def all_gather(self, tensor: tf.Tensor) -> tf.Tensor:
        """Stacks copies of the tensor; TensorFlow gathers their lengths (int32), and then themselves."""
        members = self._members(())
        lengths = recorded(tensor, "all-gather", tf.int32.size * self.replicas, members)
        nbytes = bytes_of(tensor) * self.replicas
        gathered = recorded(lengths, "all-gather", nbytes, members)
        return tf.stack([gathered] * self.replicas)


class RecordedProcessCommunicator(_RecordedTransfers, ProcessCommunicator):
    """Communicator over all processes, recorded."""


class RecordedMirroredCommunicator(MirroredCommunicator):
    """Communicator of all replicas of a process, which are computed; records what replica 0 sends."""

    def _sum(self, tensors: list[tf.Tensor]) -> list[tf.Tensor]:
        if self.replica_index() == 0:
            everyone = range(self.replicas)
            tensors = [all_reduced(tensor, everyone) for tensor in tensors]
        return super()._sum(tensors)

    def all_gather(self, tensor: tf.Tensor) -> tf.Tensor:
        if self.replica_index() == 0:
            nbytes = bytes_of(tensor) * self.replicas
            tensor = recorded(tensor, "all-gather", nbytes, range(self.replicas))
        return super().all_gather(tensor)

    def send_receive(self, tensor: tf.Tensor, destination: int, source: int) -> tf.Tensor:
        if self.replica_index() == 0 != destination:
            tensor = recorded(tensor, "send", bytes_of(tensor), (0, destination))
        return super().send_receive(tensor, destination, source)

    def all_reduce_within(self, tensor: tf.Tensor, subgroups: Subgroups) -> tf.Tensor:
        """Sums the copies that each replica has of the tensors of its subgroup."""
        return super().all_reduce_within(self._sent_to_others(tensor, subgroups), subgroups)

    def broadcast_within(self, tensor: tf.Tensor, subgroups: Subgroups) -> tf.Tensor:
        sent = tensor
        if local_subgroup(0, subgroups)[:1] == (0,):
            sent = self._sent_to_others(tensor, subgroups)
        return super().broadcast_within(sent, subgroups)

    def _sent_to_others(self, tensor: tf.Tensor, subgroups: Subgroups) -> tf.Tensor:
        """Records that replica 0 sends a tensor of any shape to each other one of its subgroup."""
        if self.replica_index() == 0:
            for other in set(local_subgroup(0, subgroups)) - {0}:
                tensor = recorded(tensor, "send", bytes_of(tensor), (0, other))
        return tensor
