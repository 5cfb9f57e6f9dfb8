"""The JAX replica of a sharded run, which updates some of the weights alone; and its collectives.

Functions that processes compile may differ, as their weights do. XLA assumes that all processes run the
same program: it orders independent collectives by the shapes around them, leaves out those
whose results are unused, and folds collectives of constants. So the input of a
collective is either an argument of a function that all compile alike (`Compiled`), or computed alike by all
of them (`InOrder`).
"""

from __future__ import annotations

import functools
import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from isotrain.plugin import ReduceOp, Subgroups, index_within
from isotrain_jax import mesh
from isotrain_jax.mesh import ReplicaMesh
from isotrain_jax.program import ReplicaTrainer, State
from isotrain_jax.replica import JaxReplica


class Exchanges(ABC):
    """Runs collectives one after the other."""

    @abstractmethod
    def make(
        self, exchange: Callable[..., jax.Array], tensor: jax.Array, *static: Hashable
    ) -> jax.Array:
        """Runs the collective `exchange(tensor, *static)`, any shape. Collective."""


class Compiled(Exchanges):
    """Collectives each of which is compiled as a function of its own.

    The next one waits for it: XLA may begin two functions on CPUs in any order.
    """

    def __init__(self, ties: ReplicaMesh) -> None:
        self._ties = ties
        self._functions: dict[Any, Callable[..., Any]] = {}

    def make(
        self, exchange: Callable[..., jax.Array], tensor: jax.Array, *static: Hashable
    ) -> jax.Array:
        key = (exchange, static)
        if key not in self._functions:

            def function(own: Any) -> Any:
                return mesh.packed(exchange(mesh.unpacked(own), *static))

            self._functions[key] = self._ties.compile(function)
        given = self._ties.lift(mesh.packed(tensor))
        result: jax.Array = mesh.unpacked(self._ties.lower(self._functions[key](given)))
        return result.block_until_ready()


class InOrder(Exchanges):
    """Collectives in one traced function, each but the first with a dependency on the one before.

    All replicas compute the input of the first alike. The function has to use the result of the last one.
    """

    def __init__(self, never: jax.Array) -> None:
        """Takes the false value by which the dependencies are made.

        Args:
            never: False, bool, shape `[1]`, as an argument, so that the compiler cannot fold it.
        """
        self._never = never
        self._last: jax.Array | None = None

    def make(
        self, exchange: Callable[..., jax.Array], tensor: jax.Array, *static: Hashable
    ) -> jax.Array:
        if self._last is not None:
            tensor = jnp.where(self._never[0], self._last.astype(tensor.dtype), tensor)
        result = exchange(tensor, *static)
        self._last = result.reshape(-1)[0]
        return result


class ShardedReplica(JaxReplica):
    """Replica that can read, write and all-gather some of its weights."""

    def __init__(
        self, program: ReplicaTrainer, ties: ReplicaMesh, state: State, exchanges: Exchanges
    ) -> None:
        super().__init__(program, ties, state)
        self._exchanges = exchanges

    def read_weights(self, indices: Sequence[int]) -> jax.Array:
        weights = self.state.trainable
        widest = max((weight.dtype for weight in weights), key=lambda dtype: dtype.itemsize)
        own = [weights[index] for index in indices]
        return _joined(own, widest) if own else jnp.zeros(0, widest)

    def write_weights(self, indices: Sequence[int], vector: jax.Array) -> None:
        weights = list(self.state.trainable)
        values = _separated(vector, [weights[index] for index in indices])
        for index, value in zip(indices, values, strict=True):
            weights[index] = value
        self.state = self.state._replace(trainable=weights)

    def all_reduce(self, tensor: jax.Array, op: ReduceOp = "sum") -> jax.Array:
        return self._exchanges.make(mesh.all_reduce, tensor, op)

    def all_gather(self, tensor: jax.Array) -> jax.Array:
        return self._exchanges.make(mesh.all_gather, tensor)

    def send_receive(self, tensor: jax.Array, destinations: Sequence[int]) -> jax.Array:
        return self._exchanges.make(mesh.permute, tensor, tuple(destinations))

    def all_reduce_within(self, tensor: jax.Array, subgroups: Subgroups) -> jax.Array:
        if not tensor.size:
            return tensor
        return self._exchanges.make(mesh.all_reduce_within, tensor, _hashable(subgroups))

    def broadcast_within(self, tensor: jax.Array, subgroups: Subgroups) -> jax.Array:
        return self._exchanges.make(mesh.broadcast_within, tensor, _hashable(subgroups))

    def reduce_scatter(self, vector: jax.Array, sizes: Sequence[int]) -> jax.Array:
        total = self._exchanges.make(_sum_of_part, vector, tuple(sizes))
        return total[: sizes[self.index]]

    def reduce_scatter_within(
        self, vector: jax.Array, sizes: Sequence[int], subgroups: Subgroups
    ) -> jax.Array:
        total = self._exchanges.make(_sum_of_part, vector, tuple(sizes), _hashable(subgroups))
        return total[: sizes[index_within(self.index, subgroups)]]

    def all_gather_shards(self, shard: jax.Array, sizes: Sequence[int]) -> jax.Array:
        return self._exchanges.make(_whole, _filled(shard, max(sizes)), tuple(sizes))

    def all_gather_shards_within(
        self, shard: jax.Array, sizes: Sequence[int], subgroups: Subgroups
    ) -> jax.Array:
        filled = _filled(shard, max(sizes))
        return self._exchanges.make(_whole, filled, tuple(sizes), _hashable(subgroups))


@functools.partial(jax.jit, static_argnums=1)
def _joined(arrays: Sequence[jax.Array], dtype: Any) -> jax.Array:
    """Arrays of any shapes, flattened and concatenated to a vector of a dtype."""
    return jnp.concatenate([array.astype(dtype).reshape(-1) for array in arrays])


@jax.jit
def _separated(vector: jax.Array, like: Sequence[jax.Array]) -> list[jax.Array]:
    """Inverse of `_joined`: arrays in the shapes and dtypes of `like`."""
    ends = list(itertools.accumulate(array.size for array in like))
    parts = jnp.split(vector, ends[:-1])
    return [
        part.astype(array.dtype).reshape(array.shape)
        for part, array in zip(parts, like, strict=True)
    ]


def _filled(vector: jax.Array, size: int) -> jax.Array:
    """A vector padded with zeros to a length."""
    return vector if vector.size == size else jnp.pad(vector, (0, size - vector.size))


def _sum_of_part(
    vector: jax.Array, sizes: tuple[int, ...], within: Subgroups | None = None
) -> jax.Array:
    """Reduce-scatter of a vector; the shard is padded to the longest one, as all are sent. Collective."""
    parts = jnp.split(vector, list(itertools.accumulate(sizes))[:-1])
    filled = [_filled(part, max(sizes)) for part in parts]
    return mesh.sum_part(jnp.concatenate(filled), 0, within)


def _whole(part: jax.Array, sizes: tuple[int, ...], within: Subgroups | None = None) -> jax.Array:
    """All-gather of vectors that are padded to one length: shape `[sum(sizes)]`. Collective."""
    rows = mesh.all_gather(part, within)
    return jnp.concatenate([rows[place, :size] for place, size in enumerate(sizes)])


def _hashable(subgroups: Subgroups) -> tuple[tuple[int, ...], ...]:
    return tuple(map(tuple, subgroups))
