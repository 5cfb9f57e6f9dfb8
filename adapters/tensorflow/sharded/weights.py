"""Weights of a model that lie in parts over TensorFlow's replicas, and are joined while a pass runs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from isotrain.adapters.common.sharding import ShardSpec, shard_sizes
from isotrain.adapters.tensorflow.base.variables import assign_anew, named_as, value_of
from isotrain.adapters.tensorflow.comm.base import Communicator, plan_buckets
from isotrain.adapters.tensorflow.trainer.state import native
from isotrain.plugin import DATA, SHARD, DeviceMesh


class ShardedWeights:
    """The weights of a replica, which keeps a part of each.

    The variables of the model have numbers only while all weights are here: between, each holds one NaN in
    the place of all that it has.

    Attributes:
        of_model: The weights.
        variables: The own parts, under the names of the weights.
        local_shards: The same, as TensorFlow has them.
        shard_specs: How each weight is cut.
        shard_index: Which of the parts are the own ones.
        keepalive_outputs: For whoever traces to return: without them, TensorFlow would leave out a sum of
            which no part is this replica's, while others wait for its share.
    """

    def __init__(
        self, weights: Sequence[Any], communicator: Communicator, mesh: DeviceMesh
    ) -> None:
        """Keeps the own part of each weight, and lets all else go.

        Args:
            weights: Of one type, equal on all replicas.
            communicator: Ties this replica to the others.
            mesh: How parts lie over the replicas.
        """
        groups, own = mesh.groups(SHARD), communicator.replica_index()
        members = next(group for group in groups if own in group)
        self.shard_index = members.index(own)
        self._within = groups if len(groups) > 1 else ()
        self._same = mesh.groups(DATA) if DATA in mesh.sizes else ()
        self._shards = groups
        self._communicator = communicator
        self.of_model = list(weights)
        self._whole = [native(weight) for weight in weights]
        self._places = {id(weight): place for place, weight in enumerate(weights)}
        self._is_unsharded = True
        self.shard_specs = [ShardSpec(tuple(weight.shape), len(members)) for weight in self._whole]
        self.variables = [
            named_as(weight, self.local_shard_of(place, value_of(self._whole[place])))
            for place, weight in enumerate(weights)
        ]
        self.local_shards = [native(variable) for variable in self.variables]
        self.keepalive_outputs: list[tf.Tensor] = []
        self.reshard()

    @property
    def is_unsharded(self) -> bool:
        """Whether all weights are here."""
        return self._is_unsharded

    def has(self, variable: Any) -> bool:
        """Whether a variable of the model is one of the weights."""
        return id(variable) in self._places

    def place_of(self, weight: Any) -> int:
        """Which of the weights it is."""
        return self._places[id(weight)]

    def local_shard_of(self, place: int, whole: Any) -> Any:
        """Of what lies as a weight does, a tensor or an array, the part that is here."""
        cut = self.shard_specs[place]
        ends = zip(
            cut.shard_offset(self.shard_index), cut.shard_shape(self.shard_index), strict=True
        )
        return whole[tuple(slice(start, start + size) for start, size in ends)]

    def refresh_shards(self, places: Sequence[int]) -> None:
        """Makes own parts what the weights are, which somebody has set while all are here; not traced."""
        for place in places:
            self.local_shards[place].assign(
                self.local_shard_of(place, value_of(self._whole[place]))
            )

    def reshard(self) -> None:
        """Leaves this replica its parts alone; not traced."""
        if not self._is_unsharded:
            return
        for weight in self._whole:
            assign_anew(weight, tf.constant(np.nan, weight.dtype))
        self._is_unsharded = False

    def trace_unshard(self, unit_bytes: int) -> None:
        """Gives the variables of the model all weights, so many bytes at a time, while this is traced."""
        before: list[tf.Operation] = []
        for places in plan_buckets(self._whole, unit_bytes):
            with tf.control_dependencies(before):
                own = [value_of(self.local_shards[place]) for place in places]
                joined = self._joined(places, *own)
                before = [
                    assign_anew(self._whole[place], whole)
                    for place, whole in zip(places, joined, strict=True)
                ]

    def mark_unsharded(self) -> None:
        """Notes that all weights are here."""
        self._is_unsharded = True

    def all_gather(self, places: Sequence[int], parts: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Weights, joined of what each replica has; their gradients become those of the parts.

        Args:
            places: Of the weights.
            parts: The own ones.
        """

        @tf.custom_gradient
        def join(*own: tf.Tensor) -> Any:
            def backward(*gradients: Any) -> list[tf.Tensor]:
                return self._reduced(places, [tf.convert_to_tensor(each) for each in gradients])

            return self._joined(places, *own), backward

        found: list[tf.Tensor] = join(*parts)
        return found

    def norms(self, tensors: Sequence[tf.Tensor]) -> tf.Tensor:
        """The norms of the wholes of tensors of which the replicas have parts: float64, one for each."""
        squares = [tf.reduce_sum(tf.cast(each, tf.float64) ** 2) for each in tensors]
        return tf.sqrt(self._communicator.all_reduce_within(tf.stack(squares), self._shards))

    def _joined(self, places: Sequence[int], *own: tf.Tensor) -> list[tf.Tensor]:
        flat = tf.concat([tf.reshape(part, [-1]) for part in own], axis=0)
        sizes = shard_sizes([self.shard_specs[place] for place in places])
        whole = self._communicator.all_gather_shards(flat, sizes, self._within)
        of_each = [
            tf.split(of_replica, [self.shard_specs[place].shard_numel(replica) for place in places])
            for replica, of_replica in enumerate(tf.split(whole, sizes))
        ]
        pieces = zip(places, zip(*of_each, strict=True), strict=True)
        return [_joined(self.shard_specs[place], parts) for place, parts in pieces]

    def _reduced(self, places: Sequence[int], gradients: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """The own parts of the means of gradients."""
        pairs = zip(places, gradients, strict=True)
        parted = [
            tf.split(each, self.shard_specs[place].shard_lengths, self.shard_specs[place].axis)
            for place, each in pairs
        ]
        of_each = [part for parts in zip(*parted, strict=True) for part in parts]
        vector = tf.concat([tf.reshape(part, [-1]) for part in of_each], axis=0)
        sizes = shard_sizes([self.shard_specs[place] for place in places])
        own, proof = self._communicator.reduce_scatter(vector, sizes, self._within)
        self.keepalive_outputs.append(proof)
        if self._same and sizes[self.shard_index]:
            own = self._communicator.all_reduce_within(own, self._same)
        own_sizes = [self.shard_specs[place].shard_numel(self.shard_index) for place in places]
        means = tf.split(own / self._communicator.replicas, own_sizes)
        return [
            tf.reshape(mean, self.shard_specs[place].shard_shape(self.shard_index))
            for place, mean in zip(places, means, strict=True)
        ]


def _joined(cut: ShardSpec, parts: Sequence[tf.Tensor]) -> tf.Tensor:
    """The whole of parts that are flat."""
    shaped = [tf.reshape(part, cut.shard_shape(place)) for place, part in enumerate(parts)]
    return tf.concat(shaped, cut.axis)
