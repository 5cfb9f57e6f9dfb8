"""One replica as a computation of a strategy sees it: state, tensor functions, collectives."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, Literal, Protocol

from isotrain.core.errors import UnsupportedError

Tensor = Any
"""A tensor of the backend's framework; it has the arithmetic operators, `@`, `shape` and `dtype`."""

ReduceOp = Literal["sum", "mean", "max"]
StatePart = Literal["trainable", "statistics", "momenta"]
Subgroups = Sequence[Sequence[int]]
"""Disjoint sets of replicas, by index; each sorted. A replica may be in none of them."""

Computation = Callable[..., Any]
"""`computation(replica, *own)`: gets a `Replica` and its own part of each value; gives a tensor, a list
or tuple of such results, or None."""


class TensorFunctions(Protocol):
    """The functions on tensors that strategies may use: so many of those of `keras.ops`."""

    def abs(self, x: Tensor) -> Tensor:
        """Elementwise."""

    def cast(self, x: Tensor, dtype: Any) -> Tensor:
        """To a type by name, or to that of another tensor."""

    def concatenate(self, xs: Sequence[Tensor], axis: int = 0) -> Tensor:
        """Joins tensors along an axis."""

    def maximum(self, x1: Tensor, x2: Tensor) -> Tensor:
        """The larger one, elementwise."""

    def qr(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The reduced QR decomposition of a matrix."""

    def reshape(self, x: Tensor, newshape: Sequence[int]) -> Tensor:
        """The same elements in another shape."""

    def split(self, x: Tensor, indices_or_sections: Sequence[int], axis: int = 0) -> list[Tensor]:
        """Cuts a tensor at these places."""

    def take(self, x: Tensor, indices: Tensor) -> Tensor:
        """The elements of a vector at these places."""

    def top_k(self, x: Tensor, k: int, sorted: bool = True) -> tuple[Tensor, Tensor]:
        """The largest k elements of a vector, and their places."""

    def transpose(self, x: Tensor) -> Tensor:
        """A matrix with rows and columns exchanged."""

    def zeros(self, shape: Sequence[int], dtype: Any) -> Tensor:
        """Zeros of a shape and type."""

    def zeros_like(self, x: Tensor) -> Tensor:
        """Zeros of the same shape and type."""


class Replica(ABC):
    """What `ReplicaGroup.compute` gives a computation.

    Every collective is called by all replicas of the run, in the same order and with equal shapes; inside
    parts, groups of sharded runs take other shapes in each part.

    Attributes:
        index: Of this replica in the run.
        replicas: In the run.
        ops: The framework's functions on tensors.
    """

    index: int
    replicas: int
    ops: TensorFunctions

    @abstractmethod
    def read(self, parts: Sequence[StatePart]) -> Tensor:
        """Copies state into one new vector, in the widest of the types it has.

        `trainable` are the trainable weights; `statistics` the weights that forward passes move;
        `momenta` the optimizer's tensors of one dimension or more. Without any, its length is 0.
        """

    @abstractmethod
    def write(self, parts: Sequence[StatePart], vector: Tensor) -> None:
        """Sets state to the values of a vector such as `read` gives for the same parts."""

    def read_weights(self, places: Sequence[int]) -> Tensor:
        """Copies some of the trainable weights, by their places among them, into one new vector.

        It is in the widest of the types that trainable weights have, also where there are none to copy.
        """
        raise UnsupportedError(f"{type(self).__name__} reads trainable weights all at once.")

    def write_weights(self, places: Sequence[int], vector: Tensor) -> None:
        """Sets trainable weights to the values of a vector such as `read_weights` gives."""
        raise UnsupportedError(f"{type(self).__name__} writes trainable weights all at once.")

    @abstractmethod
    def scatter_add(self, places: Tensor, values: Tensor, length: int) -> Tensor:
        """A vector of zeros to which `values[i]` is added at `places[i]` (int32)."""

    @abstractmethod
    def all_reduce(self, tensor: Tensor, op: ReduceOp = "sum") -> Tensor:
        """Reduces a tensor over all replicas."""

    @abstractmethod
    def all_gather(self, tensor: Tensor) -> Tensor:
        """Stacks the tensors of all replicas: shape `[replicas, *shape]`."""

    def reduce_scatter(self, vector: Tensor, sizes: Sequence[int]) -> Tensor:
        """Sums a vector over all replicas, of which each gets a part: a reduce-scatter.

        Args:
            vector: Of `sum(sizes)` numbers.
            sizes: How many of them each replica gets, one after the other.
        """
        start = sum(sizes[: self.index])
        total = self.all_reduce(vector)
        return total[start : start + sizes[self.index]]

    def all_gather_shards(self, shard: Tensor, sizes: Sequence[int]) -> Tensor:
        """Joins the parts of all replicas into one vector: an all-gather of parts of any sizes.

        Args:
            shard: This replica's, a vector.
            sizes: How many numbers each replica has.
        """
        rest = max(sizes) - sizes[self.index]
        filled = self.ops.concatenate([shard, self.ops.zeros((rest,), shard.dtype)])
        rows = self.all_gather(filled)
        return self.ops.concatenate([rows[i][:size] for i, size in enumerate(sizes)])

    def reduce_scatter_within(
        self, vector: Tensor, sizes: Sequence[int], subgroups: Subgroups
    ) -> Tensor:
        """As `reduce_scatter`, over the replicas of one set of several.

        Args:
            vector: Of `sum(sizes)` numbers.
            sizes: How many of them each replica of a set gets, one after the other.
            subgroups: The sets, each of `len(sizes)` replicas; each replica is in one of them.
        """
        index = index_within(self.index, subgroups)
        start = sum(sizes[:index])
        return self.all_reduce_within(vector, subgroups)[start : start + sizes[index]]

    def all_gather_shards_within(
        self, shard: Tensor, sizes: Sequence[int], subgroups: Subgroups
    ) -> Tensor:
        """As `all_gather_shards`, over the replicas of one set of several.

        Args:
            shard: This replica's, a vector.
            sizes: How many numbers each replica of a set has.
            subgroups: The sets, each of `len(sizes)` replicas; each replica is in one of them.
        """
        index = index_within(self.index, subgroups)
        before, after = sum(sizes[:index]), sum(sizes[index + 1 :])
        rest = [self.ops.zeros((size,), shard.dtype) for size in (before, after)]
        return self.all_reduce_within(self.ops.concatenate([rest[0], shard, rest[1]]), subgroups)

    @abstractmethod
    def send_receive(self, tensor: Tensor, destinations: Sequence[int]) -> Tensor:
        """Sends a tensor to one replica, and gives the one that was sent to this replica.

        Args:
            tensor: Of the same shape on every replica.
            destinations: For every replica of the run whom it sends to: a permutation.
        """

    @abstractmethod
    def all_reduce_within(self, tensor: Tensor, subgroups: Subgroups) -> Tensor:
        """Sums a tensor over the replicas of each part; one that is in no part keeps its own."""

    @abstractmethod
    def broadcast_within(self, tensor: Tensor, subgroups: Subgroups) -> Tensor:
        """Gives each part the tensor of its first replica; one that is in no part keeps its own."""


def local_subgroup(replica: int, subgroups: Subgroups) -> tuple[int, ...]:
    """The part that a replica is in; empty where it is in none, or alone."""
    for subgroup in subgroups:
        if replica in subgroup and len(subgroup) > 1:
            return tuple(subgroup)
    return ()


def index_within(replica: int, subgroups: Subgroups) -> int:
    """Which of the replicas of its part a replica is; it is in one of them."""
    return next(subgroup.index(replica) for subgroup in subgroups if replica in subgroup)
