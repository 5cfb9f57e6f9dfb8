"""Sums over the parts of a global batch, in the order of one binary tree for any number of replicas.

Logical workers whose number does not change: Li et al., "EasyScale", SC '23.

Where replicas sum several subtrees alone, as 3 replicas of 8 parts do, a message can spare another one: what
a replica receives may complete a subtree, of which it then sends the sum. `_TRANSFERS` is such an order.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping, Sequence

from isotrain.core.contracts.backend.computations import flatten, unflatten
from isotrain.core.contracts.backend.replica import Replica, Tensor
from isotrain.core.data.sampler import equal_part_counts, part_bounds

_SMALL = 1 << 12
"""Elements up to which vectors are all-gathered, and every replica adds all of them."""
LARGE = 1 << 24
"""Elements from which on vectors are sent by `_TRANSFERS`: fewer bytes, in more and smaller messages."""
Subtree = tuple[int, int]
"""First part and number of parts."""
_SPANS: list[list[Subtree]] = [[(0, 2), (2, 1)], [(3, 1), (4, 2)], [(6, 2)]]
"""Subtrees that each of 3 replicas of 8 parts sums alone, for which `_TRANSFERS` is made."""
_SEGMENTS = 11
"""Segments into which it cuts a vector."""
_TRANSFERS: Sequence[Sequence[tuple[int, int, Subtree]]] = (
    ((1, 0, (0, 2)), (2, 1, (4, 2)), (0, 2, (6, 2))),
    ((1, 0, (2, 1)), (2, 3, (4, 2)), (0, 1, (4, 4))),
    ((1, 4, (0, 2)), (2, 5, (4, 2)), (0, 3, (4, 4))),
    ((1, 4, (2, 1)), (2, 6, (4, 2)), (0, 5, (4, 4))),
    ((1, 7, (0, 2)), (2, 8, (4, 2)), (0, 6, (4, 4))),
    ((1, 7, (2, 1)), (2, 9, (4, 2)), (0, 8, (4, 4))),
    ((1, 10, (0, 2)), (0, 1, (3, 1)), (2, 0, (6, 2))),
    ((2, 1, (0, 8)), (0, 2, (3, 1)), (1, 0, (6, 2))),
    ((1, 1, (0, 8)), (2, 0, (0, 8)), (0, 9, (4, 4))),
    ((1, 10, (2, 1)), (0, 2, (4, 2)), (2, 0, (6, 2))),
    ((2, 2, (0, 8)), (0, 3, (3, 1)), (1, 4, (6, 2))),
    ((1, 2, (0, 8)), (2, 4, (0, 8)), (0, 0, (0, 8))),
    ((2, 3, (0, 8)), (0, 5, (3, 1)), (1, 7, (6, 2))),
    ((1, 3, (0, 8)), (2, 7, (0, 8)), (0, 4, (0, 8))),
    ((2, 5, (0, 8)), (0, 6, (3, 1)), (1, 10, (6, 2))),
    ((2, 6, (0, 8)), (0, 8, (3, 1)), (1, 5, (0, 8))),
    ((2, 8, (0, 8)), (0, 9, (3, 1)), (1, 6, (0, 8))),
    ((1, 9, (0, 8)), (2, 10, (0, 8)), (0, 7, (0, 8))),
    ((1, 8, (0, 8)), (2, 9, (0, 8)), (0, 10, (0, 8))),
)
"""What each of 3 replicas sends in each round: destination, segment, and the subtree whose sum it is.

Each segment takes 5 messages, 3 that bring the sums together and 2 that spread the total; a ring all-reduce
takes 4. Replicas 0 and 1 send in all 19 rounds, which is 1.3 times what they send in a ring. A search found
it, for the fewest rounds in which each replica sends and receives one segment at most. Fewer segments leave
more rounds idle: with the fewest rounds that gain anything, 7, it is 1.35 times a ring.
"""


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


def subtrees_of_replicas(part_counts: Sequence[int]) -> list[list[Subtree]]:
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
        padding = replica.ops.zeros((-length % math.lcm(replica.replicas, _SEGMENTS),), dtype)
        vectors = [
            flatten(replica.ops, [*(row[index] for index in indices), padding]) for row in rows
        ]
        total = _sum_of_vectors(replica, vectors, spans)[:length]
        for index, tensor in zip(indices, unflatten(replica.ops, total, likes), strict=True):
            totals[index] = tensor
    return totals


def _sum_of_vectors(
    replica: Replica, vectors: Sequence[Tensor], spans: Sequence[Sequence[Subtree]]
) -> Tensor:
    """Sum of the vectors of all subtrees of all replicas. Collective.

    They have one dtype, and one length, which is a multiple of the number of replicas and of `_SEGMENTS`.

    Each replica gets a segment of all vectors, adds these, and sends the others its segment of the sum. With
    one subtree for each replica that is as many bytes as a ring all-reduce sends.
    """
    ops, replicas, length = replica.ops, replica.replicas, vectors[0].shape[0]
    if _is_by_transfers(length, spans):
        return _sum_by_transfers(replica, vectors)
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


def _is_by_transfers(length: int, spans: Sequence[Sequence[Subtree]]) -> bool:
    """Whether vectors of this length are sent by `_TRANSFERS`."""
    return spans == _SPANS and length >= LARGE


def _sum_by_transfers(replica: Replica, vectors: Sequence[Tensor]) -> Tensor:
    """Sum of the vectors of all subtrees of 3 replicas, in fewer bytes. Collective."""
    size = vectors[0].shape[0] // _SEGMENTS
    held: list[dict[Subtree, Tensor]] = [
        {
            subtree: vector[segment * size : (segment + 1) * size]
            for subtree, vector in zip(_SPANS[replica.index], vectors, strict=True)
        }
        for segment in range(_SEGMENTS)
    ]
    for transfers in _TRANSFERS:
        destinations = [destination for destination, _, _ in transfers]
        _, segment, subtree = transfers[replica.index]
        received = replica.send_receive(_subtree_sum(held[segment], subtree), destinations)
        _, segment, subtree = transfers[destinations.index(replica.index)]
        held[segment][subtree] = received
    return replica.ops.concatenate([_subtree_sum(each, (0, 8)) for each in held])


def _subtree_sum(sums: Mapping[Subtree, Tensor], subtree: Subtree) -> Tensor:
    """Sum of a subtree, from the sums of itself or of smaller ones: vectors of one length."""
    if subtree in sums:
        return sums[subtree]
    first, count = subtree
    half = count // 2
    return _subtree_sum(sums, (first, half)) + _subtree_sum(sums, (first + half, half))


def _finished(rows: Tensor, spans: Sequence[Sequence[Subtree]]) -> Tensor:
    """Sum of all subtrees: `rows[replica][index]` are vectors of one length."""
    tree = SumTree()
    for replica, replica_spans in enumerate(spans):
        for index, (first, count) in enumerate(replica_spans):
            tree.add(first, count, [rows[replica][index]])
    ((_, _, (total,)),) = tree.subtrees
    return total


def exchanged_bytes(gradient_bytes: int, elements: int, parts: int, replicas: int) -> float:
    """Bytes that the replica that sends the most sends per step for sums over all parts, dealt equally.

    Args:
        gradient_bytes: Bytes of all gradients.
        elements: Elements of all gradients.
        parts: Number of parts.
        replicas: Number of replicas.
    """
    spans = subtrees_of_replicas(equal_part_counts(parts, replicas))
    if _is_by_transfers(elements, spans):
        return len(_TRANSFERS) / _SEGMENTS * gradient_bytes
    depth = max(map(len, spans))
    return (depth + 1) * (replicas - 1) / replicas * gradient_bytes
