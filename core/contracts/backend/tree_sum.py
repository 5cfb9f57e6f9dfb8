"""Sums over the parts of a global batch, in the order of one binary tree for any number of replicas.

Logical workers whose number does not change: Li et al., "EasyScale", SC '23.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence

from isotrain.core.contracts.backend.computations import flatten, unflatten
from isotrain.core.contracts.backend.replica import Replica, Tensor
from isotrain.core.data.sampler import equal_part_counts, part_bounds

_SMALL = 1 << 12
"""Elements up to which vectors are all-gathered, and every replica adds all of them."""


class SumTree:
    """Binary tree over consecutive parts, built from left to right: halves of a subtree are added.

    Attributes:
        subtrees: First part, number of parts, and sums of tensors of the largest subtrees so far.
    """

    def __init__(self) -> None:
        """Starts without parts."""
        self.subtrees: list[tuple[int, int, Sequence[Tensor]]] = []

    def add(self, first: int, count: int, sums: Sequence[Tensor]) -> None:
        """Adds the subtree after the last one: the sums over `count` parts from part `first` on."""
        while self.subtrees:
            left_first, left_count, left = self.subtrees[-1]
            if left_count != count or left_first % (2 * count):
                break
            self.subtrees.pop()
            sums = list(map(operator.add, left, sums))
            first, count = left_first, 2 * count
        self.subtrees.append((first, count, sums))


def subtrees_of_replicas(part_counts: Sequence[int]) -> list[list[tuple[int, int]]]:
    """For each replica the first part and number of parts of the subtrees that it sums alone.

    Args:
        part_counts: Number of parts of each replica, one at least; their sum is a power of two.
    """
    spans = []
    for replica in range(len(part_counts)):
        tree = SumTree()
        for part in range(*part_bounds(part_counts, replica)):
            tree.add(part, 1, ())
        spans.append([(first, count) for first, count, _ in tree.subtrees])
    return spans


def sum_over_replicas(
    replica: Replica, *sums: Sequence[Tensor], static: tuple[int, ...]
) -> list[Tensor]:
    """Computation that finishes a `SumTree` over all replicas. Collective.

    Args:
        replica: The replica that runs this computation.
        *sums: Sums of each subtree of this replica: tensors of any shapes and dtypes.
        static: Number of parts of each replica.

    Returns:
        Sums over all parts, in the shapes and dtypes of `sums[0]`, equal to the bit on all replicas.
    """
    spans = subtrees_of_replicas(static)
    rows = sums[: len(spans[replica.index])]
    totals = list(rows[0])
    if replica.replicas == 1:
        return totals
    for dtype in dict.fromkeys(tensor.dtype for tensor in totals):
        indices = [index for index, tensor in enumerate(totals) if tensor.dtype == dtype]
        likes = [totals[index] for index in indices]
        length = sum(math.prod(tensor.shape) for tensor in likes)
        padding = replica.ops.zeros((-length % replica.replicas,), dtype)
        vectors = [
            flatten(replica.ops, [*(row[index] for index in indices), padding]) for row in rows
        ]
        total = _sum_of_vectors(replica, vectors, spans)[:length]
        for index, tensor in zip(indices, unflatten(replica.ops, total, likes), strict=True):
            totals[index] = tensor
    return totals


def _sum_of_vectors(
    replica: Replica, vectors: Sequence[Tensor], spans: Sequence[Sequence[tuple[int, int]]]
) -> Tensor:
    """Sum of the vectors of all subtrees of all replicas. Collective.

    They have one dtype, and one length, which is a multiple of the number of replicas.

    Each replica gets a segment of all vectors, adds these, and sends the others its segment of the sum. With
    one subtree for each replica that is as many bytes as a ring all-reduce sends.
    """
    ops, replicas, length = replica.ops, replica.replicas, vectors[0].shape[0]
    depth = max(map(len, spans))
    segment = length // replicas
    rows = [*vectors, *[ops.zeros_like(vectors[0])] * (depth - len(vectors))]
    if length <= _SMALL:
        gathered = ops.reshape(replica.all_gather(ops.concatenate(rows)), (replicas, depth, -1))
        return _finished(gathered, spans)
    received: dict[int, Tensor] = {}
    for shift in range(replicas):
        destinations = [(index + shift) % replicas for index in range(replicas)]
        start = destinations[replica.index] * segment
        blocks = [row[start : start + segment] for row in rows]
        block = ops.concatenate(blocks) if depth > 1 else blocks[0]
        if shift:
            block = replica.send_receive(block, destinations)
        received[(replica.index - shift) % replicas] = ops.reshape(block, (depth, segment))
    sums = replica.all_gather(_finished(received, spans))
    return ops.reshape(sums, (length,))


def _finished(rows: Tensor, spans: Sequence[Sequence[tuple[int, int]]]) -> Tensor:
    """Sum of all subtrees: `rows[replica][index]` are vectors of one length."""
    tree = SumTree()
    for replica, replica_spans in enumerate(spans):
        for index, (first, count) in enumerate(replica_spans):
            tree.add(first, count, [rows[replica][index]])
    ((_, _, (total,)),) = tree.subtrees
    return total


def exchanged_bytes(gradient_bytes: int, parts: int, replicas: int) -> float:
    """Bytes that each replica sends per step for sums over all parts, dealt equally."""
    depth = max(map(len, subtrees_of_replicas(equal_part_counts(parts, replicas))))
    return (depth + 1) * (replicas - 1) / replicas * gradient_bytes
