"""Trainable weights sharded over TensorFlow's replicas, and gathered while a pass runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from isotrain.adapters.common.weight_sharding import ShardSpec, shard_sizes
from isotrain.adapters.tensorflow.base.variables import assign_anew, named_as, value_of
from isotrain.adapters.tensorflow.comm.base import Communicator, plan_buckets
from isotrain.adapters.tensorflow.trainer.local_shards import VariableShard
from isotrain.adapters.tensorflow.trainer.state import native
from isotrain.plugin import DATA, SHARD, DeviceMesh


class ShardedWeights:
    """Weights of a model, of each of which this replica keeps one shard (ZeRO stage 3).

    The model's variables have values only while all weights are gathered; otherwise each holds a single NaN.

    Attributes:
        model_weights: Full weights of the model.
        variables: Local shards, under the names of the weights.
        shards: Local shards as TensorFlow variables, with their places in the weights.
        full_variables: Full weights as TensorFlow variables.
        shard_specs: Shard layout of each weight.
        shard_index: Index of the local shards.
        keepalive_outputs: Tensors that the traced function must return. Without them, TensorFlow would
            prune a reduce-scatter of which this replica's shard is empty, while others wait for it.
    """

    def __init__(
        self, weights: Sequence[Any], communicator: Communicator, mesh: DeviceMesh
    ) -> None:
        """Keeps the local shard of each weight, and frees the rest.

        Args:
            weights: Weights of one dtype, equal on all replicas.
            communicator: Communicator with the other replicas.
            mesh: Device mesh of the replicas.
        """
        groups, replica = mesh.groups(SHARD), communicator.replica_index()
        members = next(group for group in groups if replica in group)
        self.shard_index = members.index(replica)
        self._shard_subgroups = groups if len(groups) > 1 else ()
        self._data_subgroups = mesh.groups(DATA) if DATA in mesh.sizes else ()
        self._shard_groups = groups
        self._communicator = communicator
        self.model_weights = list(weights)
        self.full_variables = [native(weight) for weight in weights]
        self._indices = {id(weight): index for index, weight in enumerate(weights)}
        self._is_unsharded = True
        self.shard_specs = [
            ShardSpec(tuple(weight.shape), len(members)) for weight in self.full_variables
        ]
        self.variables = [
            named_as(weight, each.shard_shape(self.shard_index), self._local_shard_of(index))
            for index, (weight, each) in enumerate(zip(weights, self.shard_specs, strict=True))
        ]
        self.shards = [
            VariableShard(
                native(variable),
                tuple(shard_spec.shape),
                tuple(shard_spec.shard_offset(self.shard_index)),
            )
            for variable, shard_spec in zip(self.variables, self.shard_specs, strict=True)
        ]
        self.keepalive_outputs: list[tf.Tensor] = []
        self.reshard()

    @property
    def is_unsharded(self) -> bool:
        """Whether all weights are gathered."""
        return self._is_unsharded

    def has(self, variable: Any) -> bool:
        """Whether a variable of the model is one of the weights."""
        return id(variable) in self._indices

    def index_of(self, weight: Any) -> int:
        """Index of a weight."""
        return self._indices[id(weight)]

    def _local_shard_of(self, index: int) -> Callable[[], tf.Tensor]:
        """Function that returns the local shard of a weight, by its index."""
        shard_spec, full = self.shard_specs[index], self.full_variables[index]
        offset = shard_spec.shard_offset(self.shard_index)
        size = shard_spec.shard_shape(self.shard_index)
        return lambda: tf.slice(full, offset, size)

    def reshard(self) -> None:
        """Frees the full weights: this replica keeps its shards alone; not traced. Local."""
        if not self._is_unsharded:
            return
        for weight in self.full_variables:
            assign_anew(weight, tf.constant(np.nan, weight.dtype))
        self._is_unsharded = False

    def trace_unshard(self, unit_bytes: int) -> None:
        """Gathers all weights into the model's variables, `unit_bytes` at a time; traced. Collective."""
        previous: list[tf.Operation] = []
        for indices in plan_buckets(self.full_variables, unit_bytes):
            with tf.control_dependencies(previous):
                shards = [value_of(self.shards[index].local) for index in indices]
                gathered = self._gather(indices, *shards)
                previous = [
                    assign_anew(self.full_variables[index], full)
                    for index, full in zip(indices, gathered, strict=True)
                ]

    def mark_unsharded(self) -> None:
        """Records that all weights are gathered. Local."""
        self._is_unsharded = True

    def all_gather(self, indices: Sequence[int], shards: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Gathers weights; the backward pass reduce-scatters their gradients to means. Collective.

        Args:
            indices: Indices of the weights.
            shards: Local shard of each, shape `shard_specs[index].shard_shape(shard_index)`.

        Returns:
            The full weights, shape `shard_specs[index].shape` each.
        """

        @tf.custom_gradient
        def gather(*local_shards: tf.Tensor) -> Any:
            def backward(*gradients: Any) -> list[tf.Tensor]:
                return self._reduce_scatter(
                    indices, [tf.convert_to_tensor(gradient) for gradient in gradients]
                )

            return self._gather(indices, *local_shards), backward

        full_weights: list[tf.Tensor] = gather(*shards)
        return full_weights

    def norms(self, tensors: Sequence[tf.Tensor], indices: Sequence[int]) -> tf.Tensor:
        """Norms of full tensors from this replica's shards: float64, shape `[tensors]`. Collective."""
        squares = [tf.reduce_sum(tf.cast(tensor, tf.float64) ** 2) for tensor in tensors]
        return tf.sqrt(self._communicator.all_reduce_within(tf.stack(squares), self._shard_groups))

    def _gather(self, indices: Sequence[int], *local_shards: tf.Tensor) -> list[tf.Tensor]:
        """The full weights of these indices, in their full shapes, from their local shards. Collective."""
        flat = tf.concat([tf.reshape(shard, [-1]) for shard in local_shards], axis=0)
        sizes = shard_sizes([self.shard_specs[index] for index in indices])
        gathered = self._communicator.all_gather_shards(flat, sizes, self._shard_subgroups)
        by_replica = [
            tf.split(
                replica_shards, [self.shard_specs[index].shard_numel(replica) for index in indices]
            )
            for replica, replica_shards in enumerate(tf.split(gathered, sizes))
        ]
        pairs = zip(indices, zip(*by_replica, strict=True), strict=True)
        return [_concatenate(self.shard_specs[index], shards) for index, shards in pairs]

    def _reduce_scatter(
        self, indices: Sequence[int], gradients: Sequence[tf.Tensor]
    ) -> list[tf.Tensor]:
        """Local shards, in their shapes, of the means over replicas of full gradients. Collective."""
        pairs = zip(indices, gradients, strict=True)
        by_weight = [
            tf.split(gradient, self.shard_specs[index].shard_lengths, self.shard_specs[index].axis)
            for index, gradient in pairs
        ]
        in_replica_order = [shard for shards in zip(*by_weight, strict=True) for shard in shards]
        vector = tf.concat([tf.reshape(shard, [-1]) for shard in in_replica_order], axis=0)
        sizes = shard_sizes([self.shard_specs[index] for index in indices])
        local_sum, keepalive = self._communicator.reduce_scatter(
            vector, sizes, self._shard_subgroups
        )
        self.keepalive_outputs.append(keepalive)
        if self._data_subgroups and sizes[self.shard_index]:
            local_sum = self._communicator.all_reduce_within(local_sum, self._data_subgroups)
        local_sizes = [self.shard_specs[index].shard_numel(self.shard_index) for index in indices]
        means = tf.split(local_sum / self._communicator.replicas, local_sizes)
        return [
            tf.reshape(mean, self.shard_specs[index].shard_shape(self.shard_index))
            for index, mean in zip(indices, means, strict=True)
        ]


def _concatenate(shard_spec: ShardSpec, shards: Sequence[tf.Tensor]) -> tf.Tensor:
    """The full tensor, shape `shard_spec.shape`, of its shards, which are flat vectors."""
    shaped = [
        tf.reshape(shard, shard_spec.shard_shape(index)) for index, shard in enumerate(shards)
    ]
    return tf.concat(shaped, shard_spec.axis)
