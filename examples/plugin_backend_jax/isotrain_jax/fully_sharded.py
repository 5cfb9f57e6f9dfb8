"""Fully sharded replicas: weights and slots are arrays of the whole mesh, with a shard on each device.

The passes are each replica's own (`shard_map`), as in a data-parallel step: they join the weights, and the
gradient of that is summed in parts. The update is a function of whole arrays that lie in parts
(`NamedSharding`): XLA computes each part where it is, and sums over the replicas what an optimizer or a
norm wants of a whole weight.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from isotrain.plugin import (
    DATA,
    SHARD,
    Batch,
    Computation,
    IsotrainError,
    ProcessContext,
    TrainingSpec,
)
from isotrain_jax import layout, mesh
from isotrain_jax.group import JaxReplicaGroup
from isotrain_jax.mesh import EACH, EQUAL, Hosts, ReplicaMesh
from isotrain_jax.program import Arrays, MicroBatch, State
from isotrain_jax.state import Names


class FullyShardedGroup(JaxReplicaGroup):
    """Group of one replica that holds a shard of every weight and slot between steps."""

    _whole: Arrays | None = None
    """Unsharded weights, from `unshard_weights` to the next step; else None."""

    def __init__(self, spec: TrainingSpec, ties: ReplicaMesh, context: ProcessContext) -> None:
        """Builds the model, and keeps a shard of it. Collective, after the rendezvous.

        Args:
            spec: Training spec.
            ties: Device mesh of all replicas.
            context: Process context, whose device mesh says which replicas shard a model.
        """
        places = context.device_mesh
        self._parts = places.size(SHARD)
        self._place = places.coordinates(ties.rank)[SHARD]
        self._hosts = Hosts()
        if places.size(DATA) > 1:
            self._hosts = Hosts(places.groups(SHARD), places.groups(DATA))
        super().__init__(spec, ties)
        self._names = Names(self._program, ties.rank, self._place)
        variables = self._program.variables
        for variable in (*variables.trainable, *variables.slots):
            if self._axis(variable.shape) is not None:
                variable.value.delete()  # of which the state has its part
        self._shapes = _shapes(variables.trainable)
        self._axes = [self._axis(shape) for shape in self._shapes]
        self._step = jax.jit(self._whole_step, donate_argnums=0)
        self._finish = jax.jit(self._whole_finish, donate_argnums=0)
        self._gather = jax.jit(self._all_weights)

    def _axis(self, shape: Sequence[int]) -> int | None:
        return layout.shard_axis(shape, self._parts)

    def _spec(self, shape: Sequence[int]) -> PartitionSpec:
        """Partition of an array of this shape."""
        return mesh.cut_along(self._axis(shape), self._mesh.part_axis)

    def _computing_state(self) -> State:
        if self._whole is None:
            raise IsotrainError(
                "each replica has a part of the weights: call group.unshard_weights() on all of them first."
            )
        return self._local_state()._replace(slots=[])

    def _local_state(self) -> State:
        state = super()._local_state()
        return state if self._whole is None else state._replace(trainable=self._whole)

    def _lifted(self, state: State) -> State:
        """Global state from local state, whose weights and slots are shards or unsharded."""
        if self._whole is not None:
            self._whole = state.trainable
        variables = self._program.variables
        return State(
            self._parted(state.trainable, variables.trainable),
            self._mesh.lift(state.others),
            self._parted(state.slots, variables.slots),
            self._mesh.lift(state.metrics),
            kept=[],
        )

    def _parted(self, arrays: Arrays, variables: Sequence[Any]) -> Arrays:
        return list(map(self._part, arrays, _shapes(variables)))

    def _part(self, array: jax.Array, shape: tuple[int, ...]) -> jax.Array:
        """Global array of one weight's shard, or of the weight in its unsharded shape."""
        held = layout.shard_shape(shape, self._parts)
        if array.shape != held:
            array = self._mesh.place(layout.shard(np.asarray(array), held, self._place))
        return self._mesh.share(array, self._filled(shape), self._spec(shape))

    def _filled(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Shape of the global array of a weight, padding included."""
        cut, held = self._axis(shape), layout.shard_shape(shape, self._parts)
        return tuple(size * self._parts if a == cut else size for a, size in enumerate(held))

    def _after_pass(self, state: State) -> State:
        moved = self._mesh.lift((state.others, state.metrics))
        return self._state._replace(others=moved[0], metrics=moved[1])

    def unshard_weights(self) -> None:
        self._whole = self._mesh.lower(self._gather(self._state.trainable))

    def _all_weights(self, weights: Arrays) -> Arrays:
        whole = [self._mesh.lying(weight, EQUAL) for weight in weights]
        return list(map(layout.unpad, whole, self._shapes))

    def synchronous_step(self, batch: Batch, learning_rate: float) -> jax.Array:
        """Runs a step; returns the mean loss, a scalar. With uneven slices, passes use unsharded weights."""
        if not batch.even and self._whole is None:
            self.unshard_weights()
        loss = super().synchronous_step(batch, learning_rate)
        self._whole = None
        return loss

    def _whole_step(
        self, state: State, pieces: Sequence[MicroBatch], weights: jax.Array, rate: jax.Array
    ) -> tuple[State, jax.Array]:
        """A step as a function of global arrays, compiled at once; the loss is a scalar."""
        return self._updated(self._passes, state, pieces, weights, rate)

    def _whole_finish(
        self, state: State, loss: jax.Array, gradients: Arrays, weights: jax.Array, rate: jax.Array
    ) -> tuple[State, jax.Array]:
        """The rest of a step, after unsharded gradients; also returns the mean loss, a scalar."""
        return self._updated(self._summed, state, (loss, gradients), weights, rate)

    def _updated(
        self, work: Any, state: State, given: Any, weights: jax.Array, rate: jax.Array
    ) -> tuple[State, jax.Array]:
        """The state after an update by the mean gradients over replicas, and the mean loss, a scalar."""
        parts = list(map(mesh.cut_along, self._axes))
        lying = State(parts, EACH, EACH, EACH, EACH)
        by_replica = self._mesh.by_replica(
            work, (lying, EACH, EACH, EACH), (EQUAL, parts, EACH, EACH, EQUAL)
        )
        own = self._mesh.of_each(state.trainable, self._axes)
        bare = state._replace(trainable=own, slots=[])
        loss, gradients, others, metrics, rate = by_replica(bare, given, weights, rate)
        gradients = self._mesh.of_all(gradients, self._axes)
        slots = _shapes(self._program.variables.slots)
        exact = State(
            self._exact(state.trainable, self._shapes),
            others,
            self._exact(state.slots, slots),
            metrics,
            kept=[],
        )
        after = self._program.apply(exact, self._exact(gradients, self._shapes), rate)
        return after._replace(
            trainable=self._padded(after.trainable), slots=self._padded(after.slots)
        ), loss

    def _exact(self, arrays: Arrays, shapes: Sequence[tuple[int, ...]]) -> Arrays:
        """Global arrays without padding, partitioned as before."""
        return [
            self._mesh.lying(layout.unpad(array, shape), self._spec(shape))
            for array, shape in zip(arrays, shapes, strict=True)
        ]

    def _padded(self, arrays: Arrays) -> Arrays:
        """Inverse of `_exact`: global arrays with padding."""
        return [
            self._mesh.lying(_filled(array, self._filled(array.shape)), self._spec(array.shape))
            for array in arrays
        ]

    def _passes(
        self, state: State, pieces: Sequence[MicroBatch], weights: jax.Array, rate: jax.Array
    ) -> tuple[Any, ...]:
        """A replica's passes, which all-gather weights; returns `_means`, in the shapes as there."""
        contributed = self._program.contribution(state, pieces, weights, self._joined)
        loss, gradients, state = contributed
        return self._means(state, loss, gradients, weights, rate)

    def _summed(
        self, state: State, given: tuple[jax.Array, Arrays], weights: jax.Array, rate: jax.Array
    ) -> tuple[Any, ...]:
        """Reduce-scatters gradients of unsharded shapes; returns `_means`."""
        loss, gradients = given
        parts = [
            gradient
            if axis is None
            else mesh.sum_of_all(_filled(gradient, self._filled(gradient.shape)), axis, self._hosts)
            for gradient, axis in zip(gradients, self._axes, strict=True)
        ]
        return self._means(state, loss, parts, weights, rate)

    def _joined(self, parts: Arrays) -> Arrays:
        return [
            part
            if axis is None
            else layout.unpad(mesh.all_gather_shards(part, axis, self._hosts), shape)
            for part, axis, shape in zip(parts, self._axes, self._shapes, strict=True)
        ]

    def _means(
        self, state: State, loss: jax.Array, gradients: Arrays, weights: jax.Array, rate: jax.Array
    ) -> tuple[Any, ...]:
        """Means of the loss, a scalar, and of gradients, local shapes; other weights, metrics, rate."""
        own = [g for g, axis in zip(gradients, self._axes, strict=True) if axis is None]
        state, loss, own = self._exchanged(state, loss, own, weights)
        means = iter(own)
        gradients = [
            next(means) if axis is None else gradient / self.replicas
            for gradient, axis in zip(gradients, self._axes, strict=True)
        ]
        return loss.reshape(()), gradients, state.others, state.metrics, rate

    def keep_gradients(self) -> bool:
        return False

    def compute(
        self, computation: Computation, *values: Sequence[Any], static: Hashable = None
    ) -> list[Any]:
        """Runs a computation, which may use collectives, but sees no weights or slots. Collective."""
        before = self._state
        self._state = before._replace(trainable=[], slots=[])
        results = super().compute(computation, *values, static=static)
        self._state = self._state._replace(trainable=before.trainable, slots=before.slots)
        return results


def _shapes(variables: Sequence[Any]) -> list[tuple[int, ...]]:
    """Shapes in which a `State` holds the values of variables: a scalar's is `(1,)`."""
    return [tuple(variable.shape) or (1,) for variable in variables]


def _filled(array: jax.Array, shape: Sequence[int]) -> jax.Array:
    """The array padded with zeros at the ends of its axes to a shape."""
    return jnp.pad(array, [(0, size - own) for own, size in zip(array.shape, shape, strict=True)])
