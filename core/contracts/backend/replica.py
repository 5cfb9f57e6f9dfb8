"""The contract of a replica inside a strategy's computation: state, tensor functions, collectives."""

from __future__ import annotations

import functools
import operator
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, Protocol, runtime_checkable

from isotrain.core.contracts.backend.protocol_checks import Contract

Tensor = Any
"""A tensor of the backend's framework, with the arithmetic operators, `@`, `shape` and `dtype`."""

ReduceOp = Literal["sum", "mean", "max"]
StatePart = Literal["trainable", "statistics", "changing-statistics", "momenta"]
"""Part of a replica's state. The changing statistics, without those of layers that `set_frozen` has frozen,
are asked for of a `FreezingGroup` only."""
Subgroups = Sequence[Sequence[int]]
"""Disjoint groups of replica indices, each sorted. A replica may be in none."""

Computation = Callable[..., Any]
"""Function `computation(replica, *entries)` of a `Replica` and that replica's entry of each value; returns a
tensor, a list or tuple of such results, or None."""


class TensorFunctions(Protocol):
    """The tensor functions that strategies may use: a subset of `keras.ops`, with its signatures."""

    def abs(self, x: Tensor) -> Tensor:
        """Elementwise absolute value, any shape."""

    def cast(self, x: Tensor, dtype: Any) -> Tensor:
        """Copy in another dtype, given by name or as another tensor's `dtype`."""

    def concatenate(self, xs: Sequence[Tensor], axis: int = 0) -> Tensor:
        """Concatenation along an axis, in the widest of the dtypes; the shapes are equal along the others."""

    def maximum(self, x1: Tensor, x2: Tensor) -> Tensor:
        """Elementwise maximum of two tensors of one shape."""

    def qr(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Reduced QR decomposition of a matrix: shapes `[m, n]` to `[m, k]` and `[k, n]`, `k = min(m, n)`."""

    def reshape(self, x: Tensor, newshape: Sequence[int]) -> Tensor:
        """The same elements in row-major order in another shape."""

    def scatter(self, indices: Tensor, values: Tensor, shape: Sequence[int]) -> Tensor:
        """Vector of shape `[n]`: zeros, to which values (`[m]`) are added at int32 indices (`[m, 1]`)."""

    def split(self, x: Tensor, indices_or_sections: Sequence[int], axis: int = 0) -> list[Tensor]:
        """Parts of a tensor of any shape, cut along an axis at the given indices."""

    def take(self, x: Tensor, indices: Tensor) -> Tensor:
        """Elements of a vector at integer indices."""

    def top_k(self, x: Tensor, k: int, sorted: bool = True) -> tuple[Tensor, Tensor]:
        """The k largest elements of a vector and their int32 indices, each of shape `[k]`."""

    def transpose(self, x: Tensor) -> Tensor:
        """Transpose of a matrix: shape `[m, n]` to `[n, m]`."""

    def zeros(self, shape: Sequence[int], dtype: Any) -> Tensor:
        """Zeros of a shape and dtype."""

    def zeros_like(self, x: Tensor) -> Tensor:
        """Zeros of another tensor's shape and dtype."""


class Replica(Contract):
    """One replica, as `ReplicaGroup.compute` passes it to a computation.

    All replicas of the run call every collective in the same order and with equal shapes and dtypes; in
    sharded runs, shapes may differ between the subgroups of a collective.

    Attributes:
        index: Index of this replica in the run.
        replicas: Number of replicas in the run.
        ops: The framework's tensor functions.
    """

    index: int
    replicas: int
    ops: TensorFunctions

    @abstractmethod
    def read(self, parts: Sequence[StatePart]) -> Tensor:
        """Copies state into one new vector. Local.

        Args:
            parts: State to read: `trainable` are the trainable weights, `statistics` the weights that
                forward passes update, `momenta` the optimizer state tensors of one dimension or more.

        Returns:
            Vector of the flattened tensors, one after the other, in the widest of their dtypes; length 0
            where there are none.
        """

    @abstractmethod
    def write(self, parts: Sequence[StatePart], vector: Tensor) -> None:
        """Overwrites state with a vector in the layout of `read` for the same parts. Local."""

    def read_range(self, start: int, stop: int) -> Tensor:
        """Copies a range of the trainable weights' elements into one new vector. Local.

        The default reads all trainable weights; others read those that the range meets.

        Args:
            start: Index of the first element in the vector of `read(("trainable",))`.
            stop: Index after the last one; may be `start`.

        Returns:
            Vector of length `stop - start`, in the widest dtype of all trainable weights.
        """
        return self.read(("trainable",))[start:stop]

    def write_range(self, start: int, vector: Tensor) -> None:
        """Overwrites the trainable weights' elements from `start` on with those of a vector. Local.

        The default reads and writes all trainable weights; others those that the range meets.
        """
        weights = self.read(("trainable",))
        rest = weights[start + vector.shape[0] :]
        self.write(("trainable",), self.ops.concatenate([weights[:start], vector, rest]))

    @abstractmethod
    def all_gather(self, tensor: Tensor) -> Tensor:
        """All-gather over all replicas. Collective.

        Args:
            tensor: Tensor of any shape.

        Returns:
            The tensors of all replicas, stacked: shape `[replicas, *shape]`.
        """

    def all_reduce(self, tensor: Tensor, op: ReduceOp = "sum") -> Tensor:
        """All-reduce over all replicas, of a floating-point tensor of any shape. Collective.

        By default all replicas add the gathered tensors in the order of the replicas, so that the sums are
        equal to the bit on all of them and in every run.
        """
        gathered = self.all_gather(tensor)
        rows = [gathered[replica] for replica in range(self.replicas)]
        reduced = functools.reduce(self.ops.maximum if op == "max" else operator.add, rows)
        return self.ops.cast(reduced / self.replicas, tensor.dtype) if op == "mean" else reduced

    def reduce_scatter(self, vector: Tensor, sizes: Sequence[int]) -> Tensor:
        """Reduce-scatter (sum) over all replicas, with shards of any sizes. Collective.

        Args:
            vector: Vector to sum, length `sum(sizes)`.
            sizes: Length of each replica's shard.

        Returns:
            This replica's shard of the sum, length `sizes[index]`.
        """
        start = sum(sizes[: self.index])
        total = self.all_reduce(vector)
        return total[start : start + sizes[self.index]]

    def all_gather_shards(self, shard: Tensor, sizes: Sequence[int]) -> Tensor:
        """All-gather over all replicas of shards of any sizes. Collective.

        Args:
            shard: This replica's vector, length `sizes[index]`.
            sizes: Length of each replica's shard.

        Returns:
            The concatenated shards, length `sum(sizes)`.
        """
        padding = max(sizes) - sizes[self.index]
        padded = self.ops.concatenate([shard, self.ops.zeros((padding,), shard.dtype)])
        rows = self.all_gather(padded)
        return self.ops.concatenate([rows[i][:size] for i, size in enumerate(sizes)])

    def reduce_scatter_within(
        self, vector: Tensor, sizes: Sequence[int], subgroups: Subgroups
    ) -> Tensor:
        """Reduce-scatter (sum) within each subgroup. Collective.

        Args:
            vector: Vector to sum, length `sum(sizes)`.
            sizes: Length of the shard of each replica of a subgroup.
            subgroups: Subgroups of `len(sizes)` replicas each; every replica is in one.

        Returns:
            This replica's shard of its subgroup's sum.
        """
        index = index_within(self.index, subgroups)
        start = sum(sizes[:index])
        return self.all_reduce_within(vector, subgroups)[start : start + sizes[index]]

    def all_gather_shards_within(
        self, shard: Tensor, sizes: Sequence[int], subgroups: Subgroups
    ) -> Tensor:
        """All-gather of shards within each subgroup. Collective.

        Args:
            shard: This replica's vector.
            sizes: Length of the shard of each replica of a subgroup.
            subgroups: Subgroups of `len(sizes)` replicas each; every replica is in one.

        Returns:
            The concatenated shards of this replica's subgroup, length `sum(sizes)`, with the bits as sent.
        """
        index = index_within(self.index, subgroups)
        before, after = sum(sizes[:index]), sum(sizes[index + 1 :])
        # negative zeros, which change no bit of what they are added to, not even of another one
        start, end = (-self.ops.zeros((size,), shard.dtype) for size in (before, after))
        return self.all_reduce_within(self.ops.concatenate([start, shard, end]), subgroups)

    def send_receive(self, tensor: Tensor, destinations: Sequence[int]) -> Tensor:
        """Sends a tensor to one replica and receives one from another. Collective.

        Args:
            tensor: Tensor of any shape, the same shape on all replicas.
            destinations: Index of the replica that each replica sends to: a permutation of all replicas.

        Returns:
            The tensor that was sent to this replica.
        """
        return self.all_gather(tensor)[list(destinations).index(self.index)]

    def all_reduce_within(self, tensor: Tensor, subgroups: Subgroups) -> Tensor:
        """All-reduce (sum), any shape, within each subgroup; a replica in none keeps its own. Collective.

        The default needs equal shapes on all replicas, and adds in the order of the replicas.
        """
        rows = self.all_gather(tensor)
        subgroup = local_subgroup(self.index, subgroups) or (self.index,)
        return functools.reduce(operator.add, [rows[replica] for replica in subgroup])

    def broadcast_within(self, tensor: Tensor, subgroups: Subgroups) -> Tensor:
        """Broadcast, any shape, from each subgroup's first replica; one in none keeps its own. Collective.

        The default needs equal shapes on all replicas.
        """
        subgroup = local_subgroup(self.index, subgroups) or (self.index,)
        return self.all_gather(tensor)[subgroup[0]]


@runtime_checkable
class ShardedReplica(Protocol):
    """Replica of a sharded run (`update-shard`), which reads and writes some of its weights."""

    def read_weights(self, indices: Sequence[int]) -> Tensor:
        """Copies some trainable weights into one new vector. Local.

        Args:
            indices: Indices among the trainable weights; may be empty.

        Returns:
            Vector of the flattened weights, in order, in the widest dtype of all trainable weights.
        """

    def write_weights(self, indices: Sequence[int], vector: Tensor) -> None:
        """Overwrites trainable weights with a vector in the layout of `read_weights`. Local."""


def spans_of_range(sizes: Sequence[int], start: int, stop: int) -> Iterator[tuple[int, int, int]]:
    """Yields the parts of tensors that make up a range of their elements, one tensor after the other.

    Args:
        sizes: Number of elements of each tensor.
        start: Index of the first element of the range, counted over all tensors.
        stop: Index after the last one.

    Yields:
        Index of a tensor, and the indices, within it, of its first element in the range and after the last.
    """
    offset = 0
    for index, size in enumerate(sizes):
        first, end = max(start - offset, 0), min(stop - offset, size)
        if first < end:
            yield index, first, end
        offset += size


def local_subgroup(replica: int, subgroups: Subgroups) -> tuple[int, ...]:
    """The subgroup that contains a replica; empty if there is none or the replica is alone in it."""
    for subgroup in subgroups:
        if replica in subgroup and len(subgroup) > 1:
            return tuple(subgroup)
    return ()


def index_within(replica: int, subgroups: Subgroups) -> int:
    """Index of a replica within the subgroup that contains it."""
    return next(subgroup.index(replica) for subgroup in subgroups if replica in subgroup)
