"""Communicator and replica group of TensorFlow over Horovod.

Ring all-reduce with tensor fusion: Sergeev and Del Balso, "Horovod", arXiv 1802.05799.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf

from isotrain.adapters.horovod import runtime
from isotrain.adapters.tensorflow.base.initial_broadcast import broadcast_initial_values
from isotrain.adapters.tensorflow.comm.base import Communicator
from isotrain.adapters.tensorflow.replica.replica_group import TensorFlowReplicaGroup
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
    """Communicator with Horovod's operations inside traced functions.

    Every operation has an explicit name: replicas may have traced different functions, and Horovod pairs
    tensors by name.
    """

    def __init__(self, context: ProcessContext, backend_config: BackendConfig) -> None:
        """Starts Horovod. Collective.

        Args:
            context: Context of this process.
            backend_config: Backend configuration of the plan.
        """
        self._process_sets = runtime.ProcessSets(hvd, context, backend_config)
        self.replicas = hvd.size()
        self.local_replicas = (hvd.rank(),)
        self._graph: Any = None
        self._operations: Counter[str] = Counter()
        with tf.device("CPU:0"):
            self._negative_zero = tf.Variable(-0.0, trainable=False)  # -0.0 + 0.0 would be 0.0

    def all_reduce(self, tensors: Sequence[tf.Tensor], op: ReduceOp) -> list[tf.Tensor]:
        """One grouped all-reduce for each dtype among the tensors, which may have any shapes. Collective."""
        return self.reduce_group(tensors, op, hvd.Compression.none)

    def reduce_group(
        self, tensors: Sequence[tf.Tensor], op: ReduceOp, compression: Any
    ) -> list[tf.Tensor]:
        """Grouped all-reduce, which Horovod neither splits nor reorders. Collective.

        Args:
            tensors: Tensors of any shapes and dtypes.
            op: Reduction.
            compression: Compression from `hvd.Compression`.

        Returns:
            Reduced tensors, of the same shapes and dtypes.
        """
        results: list[Any] = [None] * len(tensors)
        for dtype in dict.fromkeys(tensor.dtype for tensor in tensors):
            indices = [i for i, tensor in enumerate(tensors) if tensor.dtype == dtype]
            reduced = hvd.grouped_allreduce(
                [sendable(tensors[i]) for i in indices],
                op=_OPERATIONS[op],
                compression=compression,
                name=f"isotrain_{op}_{dtype.name}_{len(indices)}",
                ignore_name_scope=True,
            )
            for index, value in zip(indices, reduced, strict=True):
                results[index] = tf.cast(value, dtype)
        return results

    def sum(self, tensor: tf.Tensor) -> tf.Tensor:
        """One Horovod all-reduce sum, any shape, with a name of its own. Collective."""
        return self.all_reduce_within(tensor, [range(self.replicas)])

    def all_gather(self, tensor: tf.Tensor) -> tf.Tensor:
        """One Horovod all-gather along a new first axis: shape `[replicas, *tensor.shape]`. Collective."""
        row = tf.expand_dims(sendable(tensor), 0)
        gathered = hvd.allgather(row, name="isotrain_all_gather", ignore_name_scope=True)
        return tf.cast(tf.ensure_shape(gathered, [self.replicas, *tensor.shape]), tensor.dtype)

    def _unique_name(self, kind: str) -> str:
        """Name that no other operation of the traced graph has: several may be in flight at once."""
        graph = tf.compat.v1.get_default_graph()
        if graph is not self._graph:
            self._graph, self._operations = graph, Counter()
        self._operations[kind] += 1
        return f"isotrain_{kind}_{self._operations[kind]}"

    def reduce_scatter(
        self, vector: tf.Tensor, sizes: Sequence[int], subgroups: Subgroups = ()
    ) -> tuple[tf.Tensor, tf.Tensor]:
        """One Horovod all-to-all, and a local sum.

        Returns:
            This replica's shard of the sum, `[sizes[index]]`; and the received row counts, which TensorFlow
            cannot compute without running the collective.
        """
        process_set = self._process_set(subgroups)
        if process_set is None:
            return tf.identity(vector), vector[:1]
        received, counts = hvd.alltoall(
            sendable(self._prevent_constant_folding(vector)),
            splits=tf.constant(sizes, tf.int32),
            name=self._unique_name(f"sum_parts_{process_set.process_set_id}"),
            ignore_name_scope=True,
            process_set=process_set,
        )
        rows = tf.reshape(received, [len(sizes), sizes[process_set.rank()]])
        return tf.cast(tf.reduce_sum(rows, axis=0), vector.dtype), counts

    def all_gather_shards(
        self, shard: tf.Tensor, sizes: Sequence[int], subgroups: Subgroups = ()
    ) -> tf.Tensor:
        """One Horovod all-gather of vectors of any sizes; an empty one is sent as one element. Collective."""
        process_set = self._process_set(subgroups)
        if process_set is None:
            return tf.identity(shard)
        local_size = sizes[process_set.rank()]
        sent = shard if local_size else self._prevent_constant_folding(tf.zeros(1, shard.dtype))
        gathered = hvd.allgather(
            sendable(sent),
            name=self._unique_name(f"join_parts_{process_set.process_set_id}"),
            ignore_name_scope=True,
            process_set=process_set,
        )
        sent_sizes = [max(1, size) for size in sizes]
        shards = tf.split(tf.ensure_shape(gathered, [sum(sent_sizes)]), sent_sizes)
        not_empty = [each for each, size in zip(shards, sizes, strict=True) if size]
        return tf.cast(tf.concat(not_empty, axis=0), shard.dtype)

    def _process_set(self, subgroups: Subgroups) -> Any:
        """Process set of this replica's subgroup, or of all replicas without subgroups; None if alone."""
        return self._process_sets.local(subgroups or [range(self.replicas)])

    def _prevent_constant_folding(self, tensor: tf.Tensor) -> tf.Tensor:
        """Returns an equal tensor, any shape, that TensorFlow cannot fold into a constant.

        TensorFlow treats Horovod's operations as pure: for a constant input, such as the gradient of a weight
        that the loss does not depend on, it would run one before the first step, when other replicas do not.
        """
        if tensor.dtype == tf.bool:
            return tf.logical_or(tensor, tf.cast(self._negative_zero, tf.bool))
        return tensor + tf.cast(self._negative_zero, tensor.dtype)

    def send_receive(self, tensor: tf.Tensor, destination: int, source: int) -> tf.Tensor:
        """Sends a tensor of any shape by one all-to-all in which all rows but one are empty. Collective."""
        received, counts = hvd.alltoall(
            tf.expand_dims(sendable(self._prevent_constant_folding(tensor)), 0),
            splits=tf.one_hot(destination, self.replicas, dtype=tf.int32),
            name=self._unique_name("send_receive"),
            ignore_name_scope=True,
        )
        expected = tf.one_hot(source, self.replicas, dtype=tf.int32)
        check = tf.debugging.assert_equal(
            counts,
            expected,
            f"send_receive: expected a tensor from replica {source} only; it sent none, or others did",
        )
        with tf.control_dependencies([check]):
            return tf.cast(tf.reshape(received, tensor.shape), tensor.dtype)

    def all_reduce_within(self, tensor: tf.Tensor, subgroups: Subgroups) -> tf.Tensor:
        """One Horovod all-reduce sum in this replica's process set, any shape. Collective."""
        process_set = self._process_sets.local(subgroups)
        if process_set is None:
            return tf.identity(tensor)
        total = hvd.allreduce(
            sendable(self._prevent_constant_folding(tensor)),
            op=hvd.Sum,
            name=self._unique_name(f"sum_within_{process_set.process_set_id}"),
            ignore_name_scope=True,
            process_set=process_set,
        )
        return tf.cast(total, tensor.dtype)

    def broadcast_within(self, tensor: tf.Tensor, subgroups: Subgroups) -> tf.Tensor:
        """One Horovod broadcast in this replica's process set, any shape. Collective; several may run."""
        process_set = self._process_sets.local(subgroups)
        if process_set is None:
            return tf.identity(tensor)
        root = local_subgroup(self.replica_index(), subgroups)[0]
        received = hvd.broadcast(
            sendable(self._prevent_constant_folding(tensor)),
            root,
            name=self._unique_name(f"broadcast_from_{root}_within_{process_set.process_set_id}"),
            ignore_name_scope=True,
            process_set=process_set,
        )
        return tf.cast(received, tensor.dtype)

    def close(self) -> None:
        """Shuts Horovod down; the group has waited for all processes. Collective."""
        runtime.stop(hvd)


def _broadcast_first(words: np.ndarray) -> np.ndarray:
    """Broadcasts a vector of integers from rank 0."""
    values: np.ndarray = hvd.broadcast(tf.constant(words), 0, name="isotrain.first_values").numpy()
    return values


class HorovodReplicaGroup(TensorFlowReplicaGroup):
    """Replica group of one TensorFlow replica whose gradients Horovod's grouped all-reduce averages."""

    _communicator: HorovodCommunicator

    def __init__(
        self, spec: TrainingSpec, communicator: HorovodCommunicator, options: Mapping[str, Any]
    ) -> None:
        """Builds the model, and broadcasts the weights of replica 0. Collective.

        Args:
            spec: Training spec.
            communicator: Communicator of the replica.
            options: Checked options of the backend.
        """
        super().__init__(spec, tf.distribute.get_strategy(), communicator)
        self._compression = getattr(hvd.Compression, options.get("compression", "none"))
        self._groups = options.get("groups", 1)
        trainable, others = weights_of(self.model, spec)
        broadcast_initial_values(
            [native(variable) for variable in (*trainable, *others)], _broadcast_first
        )

    def _reduced(
        self, loss: tf.Tensor, gradients: Gradients, share: tf.Tensor | None
    ) -> tuple[tf.Tensor, Gradients]:
        """All-reduces a scalar loss, gradients (weights' shapes) and moving statistics to means. Collective.

        Gradients are reduced in groups, compressed if the options say so; loss and statistics never are.
        """
        present = [gradient for gradient in gradients if gradient is not None]
        loss_and_statistics = [loss, *self._trainer.weighted_statistics(share)]
        if self._compression is hvd.Compression.none and self._groups == 1:
            means = self._communicator.all_reduce([*present, *loss_and_statistics], "mean")
            present, loss_and_statistics = means[: len(present)], means[len(present) :]
        else:
            loss_and_statistics = self._communicator.all_reduce(loss_and_statistics, "mean")
            present = self._all_reduce_in_groups(present)
        loss, *statistics = loss_and_statistics
        self._trainer.agree_on_statistics(statistics)
        reduced = iter(present)
        return loss, [None if gradient is None else next(reduced) for gradient in gradients]

    def compress(self, method: CompressionMethod, rank: int, start: int) -> bool:
        if method == "fp16":
            self._compression = hvd.Compression.fp16
            self._traced.forget()  # steps that are traced already would not compress
        return method == "fp16"

    def _all_reduce_in_groups(self, gradients: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Means of gradients, in their shapes: one all-reduce for each group of consecutive tensors."""
        size = -(-len(gradients) // self._groups)
        means: list[tf.Tensor] = []
        for start in range(0, len(gradients), size):
            group = gradients[start : start + size]
            means += self._communicator.reduce_group(group, "mean", self._compression)
        return means


def sendable(tensor: tf.Tensor) -> tf.Tensor:
    """Tensor for Horovod, any shape: bfloat16, which it does not support, is cast to float32."""
    return tf.cast(tensor, tf.float32) if tensor.dtype == tf.bfloat16 else tensor
