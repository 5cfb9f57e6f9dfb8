"""TensorFlow replicas tied together by Horovod."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf

from isotrain.adapters.horovod import runtime
from isotrain.adapters.tensorflow.base.variable_init import broadcast_initial_values
from isotrain.adapters.tensorflow.comm.base import Communicator
from isotrain.adapters.tensorflow.replica.group import TensorFlowReplicaGroup
from isotrain.adapters.tensorflow.trainer.optimizer import Gradients
from isotrain.adapters.tensorflow.trainer.state import native
from isotrain.adapters.tensorflow.trainer.weights import weights_of
from isotrain.plugin import (
    BackendConfig,
    CompressionMethod,
    ProcessContext,
    ReduceOp,
    Subgroups,
    TrainingSpec,
    local_subgroup,
)

_OPERATIONS = {"sum": hvd.Sum, "mean": hvd.Average, "max": hvd.Max}


class HorovodCommunicator(Communicator):
    """Exchanges with Horovod's operations inside traced functions.

    Every operation is named after what it does: replicas may have traced different functions, and
    Horovod pairs tensors by name.
    """

    def __init__(
        self, context: ProcessContext, backend_config: BackendConfig, subgroups: Subgroups = ()
    ) -> None:
        """Starts Horovod.

        Args:
            context: This process's place in the run.
            backend_config: What the plan resolved.
            subgroups: Of the processes, within which something is to be exchanged.
        """
        self._process_sets = runtime.ProcessSets(hvd, context, backend_config, subgroups)
        self.replicas = hvd.size()
        self.local_replicas = (hvd.rank(),)
        self._graph: Any = None
        self._operations: Counter[str] = Counter()
        with tf.device("CPU:0"):
            self._nothing = tf.Variable(-0.0, trainable=False)  # with 0.0, -0.0 would become that

    def all_reduce(self, tensors: Sequence[tf.Tensor], op: ReduceOp) -> list[tf.Tensor]:
        """One grouped all-reduce for each type among the tensors."""
        return self.reduce_group(tensors, op, hvd.Compression.none)

    def reduce_group(
        self, tensors: Sequence[tf.Tensor], op: ReduceOp, compression: Any
    ) -> list[tf.Tensor]:
        """Reduces tensors as a whole, which Horovod neither splits nor reorders.

        Args:
            tensors: Of any types.
            op: How they are reduced.
            compression: One of `hvd.Compression`: how they travel.
        """
        results: list[Any] = [None] * len(tensors)
        for dtype in dict.fromkeys(tensor.dtype for tensor in tensors):
            places = [i for i, tensor in enumerate(tensors) if tensor.dtype == dtype]
            reduced = hvd.grouped_allreduce(
                [_sendable(tensors[i]) for i in places],
                op=_OPERATIONS[op],
                compression=compression,
                name=f"isotrain_{op}_{dtype.name}_{len(places)}",
                ignore_name_scope=True,
            )
            for place, value in zip(places, reduced, strict=True):
                results[place] = tf.cast(value, dtype)
        return results

    def all_gather(self, tensor: tf.Tensor) -> tf.Tensor:
        """One Horovod all-gather along a new first axis."""
        row = tf.expand_dims(_sendable(tensor), 0)
        gathered = hvd.allgather(row, name="isotrain_all_gather", ignore_name_scope=True)
        return tf.cast(tf.ensure_shape(gathered, [self.replicas, *tensor.shape]), tensor.dtype)

    def _own_name(self, kind: str) -> str:
        """A name that no other operation of the traced graph has: several may be under way at once."""
        graph = tf.compat.v1.get_default_graph()
        if graph is not self._graph:
            self._graph, self._operations = graph, Counter()
        self._operations[kind] += 1
        return f"isotrain_{kind}_{self._operations[kind]}"

    def reduce_scatter(
        self, vector: tf.Tensor, sizes: Sequence[int], subgroups: Subgroups = ()
    ) -> tuple[tf.Tensor, tf.Tensor]:
        """One Horovod all-to-all; the sum is this replica's own."""
        process_set = self._set_of(subgroups)
        if process_set is None:
            return tf.identity(vector), vector[:1]
        received, counts = hvd.alltoall(
            _sendable(self._unforeseen(vector)),
            splits=tf.constant(sizes, tf.int32),
            name=self._own_name(f"sum_parts_{process_set.process_set_id}"),
            ignore_name_scope=True,
            process_set=process_set,
        )
        rows = tf.reshape(received, [len(sizes), sizes[process_set.rank()]])
        return tf.cast(tf.reduce_sum(rows, axis=0), vector.dtype), counts

    def all_gather_shards(
        self, shard: tf.Tensor, sizes: Sequence[int], subgroups: Subgroups = ()
    ) -> tf.Tensor:
        """One Horovod all-gather, of parts of any sizes; for one without numbers, a number goes."""
        process_set = self._set_of(subgroups)
        if process_set is None:
            return tf.identity(shard)
        has_some = sizes[process_set.rank()]
        given = shard if has_some else self._unforeseen(tf.zeros(1, shard.dtype))
        whole = hvd.allgather(
            _sendable(given),
            name=self._own_name(f"join_parts_{process_set.process_set_id}"),
            ignore_name_scope=True,
            process_set=process_set,
        )
        sent = [max(1, size) for size in sizes]
        parts = tf.split(tf.ensure_shape(whole, [sum(sent)]), sent)
        filled = [own for own, size in zip(parts, sizes, strict=True) if size]
        return tf.cast(tf.concat(filled, axis=0), shard.dtype)

    def _set_of(self, subgroups: Subgroups) -> Any:
        """The process set of the own part; without any, of all replicas; None where it is alone."""
        return self._process_sets.own(subgroups or [range(self.replicas)])

    def _unforeseen(self, tensor: tf.Tensor) -> tf.Tensor:
        """The same numbers, which TensorFlow does not know before a step.

        It takes Horovod's operations for pure functions: that of a constant, such as the gradient of a weight
        that the loss does not depend on, it would call before the first step, where the others do not.
        """
        if tensor.dtype == tf.bool:
            return tf.logical_or(tensor, tf.cast(self._nothing, tf.bool))
        return tensor + tf.cast(self._nothing, tensor.dtype)

    def send_receive(self, tensor: tf.Tensor, destination: int, source: int) -> tf.Tensor:
        """One Horovod all-to-all in which all parts but one are empty."""
        received, counts = hvd.alltoall(
            tf.expand_dims(_sendable(tensor), 0),
            splits=tf.one_hot(destination, self.replicas, dtype=tf.int32),
            name="isotrain_send_receive",
            ignore_name_scope=True,
        )
        expected = tf.one_hot(source, self.replicas, dtype=tf.int32)
        check = tf.debugging.assert_equal(
            counts,
            expected,
            f"send_receive: replica {source} did not send to this one, or others did",
        )
        with tf.control_dependencies([check]):
            return tf.cast(tf.reshape(received, tensor.shape), tensor.dtype)

    def all_reduce_within(self, tensor: tf.Tensor, subgroups: Subgroups) -> tf.Tensor:
        """One Horovod all-reduce in this replica's process set."""
        process_set = self._process_sets.own(subgroups)
        if process_set is None:
            return tf.identity(tensor)
        total = hvd.allreduce(
            _sendable(self._unforeseen(tensor)),
            op=hvd.Sum,
            name=self._own_name(f"sum_within_{process_set.process_set_id}"),
            ignore_name_scope=True,
            process_set=process_set,
        )
        return tf.cast(total, tensor.dtype)

    def broadcast_within(self, tensor: tf.Tensor, subgroups: Subgroups) -> tf.Tensor:
        """One Horovod broadcast in this replica's process set; several may be under way at once."""
        process_set = self._process_sets.own(subgroups)
        if process_set is None:
            return tf.identity(tensor)
        first = local_subgroup(self.replica_index(), subgroups)[0]
        given = hvd.broadcast(
            _sendable(self._unforeseen(tensor)),
            first,
            name=self._own_name(f"broadcast_from_{first}_within_{process_set.process_set_id}"),
            ignore_name_scope=True,
            process_set=process_set,
        )
        return tf.cast(given, tensor.dtype)

    def close(self) -> None:
        """Shuts Horovod down; the group has waited for all processes."""
        runtime.stop(hvd)


def _sent(words: np.ndarray) -> np.ndarray:
    """What rank 0 has."""
    first: np.ndarray = hvd.broadcast(tf.constant(words), 0, name="isotrain.first_values").numpy()
    return first


class HorovodReplicaGroup(TensorFlowReplicaGroup):
    """One TensorFlow replica whose gradients are averaged by Horovod's grouped all-reduce."""

    _communicator: HorovodCommunicator

    def __init__(
        self, spec: TrainingSpec, communicator: HorovodCommunicator, options: Mapping[str, Any]
    ) -> None:
        """Builds the model, and gives it the weights of replica 0.

        Args:
            spec: What to train.
            communicator: Ties this replica to all others.
            options: The backend's options, checked.
        """
        super().__init__(spec, tf.distribute.get_strategy(), communicator)
        self._compression = getattr(hvd.Compression, options.get("compression", "none"))
        self._groups = options.get("groups", 1)
        trainable, others = weights_of(self.model, spec)
        broadcast_initial_values([native(variable) for variable in (*trainable, *others)], _sent)

    def _reduced(
        self, loss: tf.Tensor, gradients: Gradients, share: tf.Tensor | None
    ) -> tuple[tf.Tensor, Gradients]:
        """Exchanges the gradients in groups; the loss and moving statistics, never compressed, too."""
        present = [gradient for gradient in gradients if gradient is not None]
        along = [loss, *self._trainer.weighted_statistics(share)]
        if self._compression is hvd.Compression.none and self._groups == 1:
            means = self._communicator.all_reduce([*present, *along], "mean")
            present, along = means[: len(present)], means[len(present) :]
        else:
            along = self._communicator.all_reduce(along, "mean")
            present = self._reduced_in_groups(present)
        loss, *statistics = along
        self._trainer.agree_on_statistics(statistics)
        reduced = iter(present)
        return loss, [None if gradient is None else next(reduced) for gradient in gradients]

    def compress(self, method: CompressionMethod, rank: int, start: int) -> bool:
        if method == "fp16":
            self._compression = hvd.Compression.fp16
            self._traced.forget()  # steps that were traced before would go on as they were
        return method == "fp16"

    def _reduced_in_groups(self, gradients: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Averages gradients in consecutive groups of nearly equal length."""
        size = -(-len(gradients) // self._groups)
        means: list[tf.Tensor] = []
        for start in range(0, len(gradients), size):
            group = gradients[start : start + size]
            means += self._communicator.reduce_group(group, "mean", self._compression)
        return means


def _sendable(tensor: tf.Tensor) -> tf.Tensor:
    """Horovod knows no bfloat16: it travels as float32."""
    return tf.cast(tensor, tf.float32) if tensor.dtype == tf.bfloat16 else tensor
