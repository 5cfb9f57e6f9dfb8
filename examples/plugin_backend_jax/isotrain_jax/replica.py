"""The JAX replica that a strategy's computations see while they are traced."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from keras import ops

from isotrain.plugin import ReduceOp, Replica, StatePart, Subgroups, spans_of_range
from isotrain_jax import mesh
from isotrain_jax.mesh import ReplicaMesh
from isotrain_jax.program import Arrays, ReplicaTrainer, State


class JaxReplica(Replica):
    """Replica that reads and writes a traced state, and communicates within the compiled function.

    Attributes:
        state: State after what the computation has done so far.
    """

    ops = ops

    def __init__(self, program: ReplicaTrainer, ties: ReplicaMesh, state: State) -> None:
        self.index = ties.rank
        self.replicas = ties.replicas
        self.state = state
        self._program = program

    def read(self, parts: Sequence[StatePart]) -> jax.Array:
        values = [value for part in parts for value in self._part(part)]
        if not values:
            return jnp.zeros(0)
        widest = max((value.dtype for value in values), key=lambda dtype: dtype.itemsize)
        return jnp.concatenate([value.astype(widest).reshape(-1) for value in values])

    def write(self, parts: Sequence[StatePart], vector: jax.Array) -> None:
        sizes = [math.prod(value.shape) for part in parts for value in self._part(part)]
        values = iter(jnp.split(vector, list(itertools.accumulate(sizes))[:-1]))
        for part in parts:
            self._set(
                part,
                [next(values).astype(old.dtype).reshape(old.shape) for old in self._part(part)],
            )

    def read_range(self, start: int, stop: int) -> jax.Array:
        weights = self._part("trainable")
        widest = max((weight.dtype for weight in weights), key=lambda dtype: dtype.itemsize)
        values = [
            weights[index].reshape(-1)[first:end].astype(widest)
            for index, first, end in spans_of_range([each.size for each in weights], start, stop)
        ]
        return jnp.concatenate([jnp.zeros(0, widest), *values])

    def write_range(self, start: int, vector: jax.Array) -> None:
        weights = self._part("trainable")
        spans = spans_of_range([each.size for each in weights], start, start + vector.size)
        for index, first, end in spans:
            old = weights[index]
            values, vector = jnp.split(vector, [end - first])
            new = old.reshape(-1).at[first:end].set(values.astype(old.dtype))
            weights[index] = new.reshape(old.shape)
        self._set("trainable", weights)

    def _part(self, name: StatePart) -> Arrays:
        field, places = self._program.places(name)
        return [getattr(self.state, field)[place] for place in places]

    def _set(self, name: StatePart, values: Arrays) -> None:
        field, places = self._program.places(name)
        changed = list(getattr(self.state, field))
        for place, value in zip(places, values, strict=True):
            changed[place] = value
        self.state = self.state._replace(**{field: changed})

    def all_reduce(self, tensor: jax.Array, op: ReduceOp = "sum") -> jax.Array:
        return mesh.all_reduce(tensor, op)

    def all_gather(self, tensor: jax.Array) -> jax.Array:
        return mesh.all_gather(tensor)

    def send_receive(self, tensor: jax.Array, destinations: Sequence[int]) -> jax.Array:
        return mesh.permute(tensor, tuple(destinations))

    def all_reduce_within(self, tensor: jax.Array, subgroups: Subgroups) -> jax.Array:
        return mesh.all_reduce_within(tensor, subgroups)

    def broadcast_within(self, tensor: jax.Array, subgroups: Subgroups) -> jax.Array:
        return mesh.broadcast_within(tensor, subgroups)
