"""Sums over the parts of a global batch, in the order of one binary tree for any number of replicas.

Logical workers whose number does not change: Li et al., "EasyScale", SC '23.

Where replicas sum several subtrees alone, as 3 replicas of 8 parts do, a message can spare another one: what
a replica receives may complete a subtree, of which it then sends the sum. `_TRANSFERS` is such an order.

Where a replica's link is slow, the others sum all segments, and it sends and receives each element once:
Diskin et al., "Distributed Deep Learning in Open Collaborations", arXiv 2106.10207, section 3.2.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping, Sequence

from isotrain.core.contracts.backend.computations import unflatten
from isotrain.core.contracts.backend.replica import Replica, Tensor, TensorFunctions, spans_of_range
from isotrain.core.data.sampler import equal_part_counts, part_bounds

SMALL = 1 << 12
"""Elements up to which vectors are all-gathered, and every replica adds all of them."""
LARGE = 1 << 21
"""Elements from which on vectors are sent by `_TRANSFERS`: fewer bytes, in more and smaller messages."""
BLOCK = 1 << 21
"""Elements that are sent and added at a time: of longer vectors, each would take new pages of memory."""
CLIENT_BLOCKS = 8
"""Blocks of a segment where there are clients, which get the sum of each block as they send the next one."""
Subtree = tuple[int, int]
"""First part and number of parts."""
Counts = tuple[int, ...]
"""Number of parts of each replica."""
Clients = tuple[int, ...]
"""Replicas that sum no segment, in ascending order, as their links are slow; half of the replicas at most."""
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


def _added(sums: Sequence[Tensor], addends: Sequence[Tensor]) -> Sequence[Tensor]:
    """Sums of the tensors of both sequences, each in memory of its own."""
    return list(map(operator.add, sums, addends))


class SumTree:
    """Binary tree over consecutive parts, built from left to right: halves of a subtree are added.

    Attributes:
        subtrees: First part, number of parts, and sums of tensors of the largest subtrees so far.
    """

    def __init__(
        self, add: Callable[[Sequence[Tensor], Sequence[Tensor]], Sequence[Tensor]] = _added
    ) -> None:
        """Starts without parts.

        Args:
            add: Function that adds each tensor of the second sequence to that of the first one. It may do so
                in place: a subtree is added once, and its tensors have memory of their own.
        """
        self._add = add
        self.subtrees: list[tuple[int, int, Sequence[Tensor]]] = []

    def add(self, first: int, count: int, sums: Sequence[Tensor]) -> None:
        """Adds the subtree after the last one: the sums over `count` parts from part `first` on."""
        while self.subtrees:
            left_first, left_count, left = self.subtrees[-1]
            if left_count != count or left_first % (2 * count):
                break
            self.subtrees.pop()
            sums = self._add(left, sums)
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
    replica: Replica, *sums: Sequence[Tensor], static: tuple[Counts, Clients]
) -> list[Tensor]:
    """Computation that finishes a `SumTree` over all replicas. Collective.

    Args:
        replica: The replica that runs this computation.
        *sums: Sums of each subtree of this replica: tensors of any shapes and dtypes.
        static: Number of parts of each replica; and the replicas that sum no segment.

    Returns:
        Sums over all parts, in the shapes and dtypes of `sums[0]`, equal to the bit on all replicas.
    """
    if replica.replicas == 1:
        return list(sums[0])
    part_counts, clients = static
    ops, spans = replica.ops, subtrees_of_replicas(part_counts)
    segments = (replica.replicas - len(clients)) * CLIENT_BLOCKS if clients else replica.replicas
    rows = sums[: len(spans[replica.index])]
    totals = list(rows[0])
    for dtype in dict.fromkeys(tensor.dtype for tensor in totals):
        indices = [index for index, tensor in enumerate(totals) if tensor.dtype == dtype]
        likes = [totals[index] for index in indices]
        length = sum(math.prod(tensor.shape) for tensor in likes)
        padding = ops.zeros((-length % math.lcm(segments, _SEGMENTS),), dtype)
        vectors = [
            [*(ops.reshape(row[index], (-1,)) for index in indices), padding] for row in rows
        ]
        total = _sum_of_vectors(replica, vectors, length + padding.shape[0], spans, clients)
        for index, tensor in zip(indices, unflatten(ops, total[:length], likes), strict=True):
            totals[index] = tensor
    return totals


def _sum_of_vectors(
    replica: Replica,
    vectors: Sequence[Sequence[Tensor]],
    length: int,
    spans: Sequence[Sequence[Subtree]],
    clients: Clients,
) -> Tensor:
    """Sum of the vectors of all subtrees of all replicas. Collective.

    Each replica gets a segment of all vectors, adds these, and sends the others its segment of the sum. With
    one subtree for each replica that is as many bytes as a ring all-reduce sends.

    Args:
        replica: The replica that runs this computation.
        vectors: Vector of each subtree of this replica, as consecutive pieces of one dtype.
        length: Length of each vector, a multiple of `_SEGMENTS`, and of the number of replicas; with clients,
            of `CLIENT_BLOCKS` times the number of the others.
        spans: Subtrees of each replica.
        clients: Replicas that sum no segment.
    """
    ops, replicas = replica.ops, replica.replicas
    if not clients and _is_by_transfers(length, spans):
        return _sum_by_transfers(replica, vectors, length // _SEGMENTS)
    depth = max(map(len, spans))
    rows = [*vectors, *[vectors[0]] * (depth - len(vectors))]  # repeated ones are not added
    if length <= SMALL:
        gathered = replica.all_gather(ops.concatenate([piece for row in rows for piece in row]))
        return _finished(ops.reshape(gathered, (replicas, depth, -1)), spans)
    if clients:
        return _sum_for_clients(replica, rows, length, spans, clients)
    segment = length // replicas
    sums = []
    for start in range(0, segment, BLOCK):
        stop = min(start + BLOCK, segment)
        received: dict[int, Tensor] = {}
        for shift in range(replicas):
            destinations = [(index + shift) % replicas for index in range(replicas)]
            first = destinations[replica.index] * segment
            blocks = [_slice(ops, row, first + start, first + stop) for row in rows]
            block = _joined(ops, blocks)
            if shift:
                block = replica.send_receive(block, destinations)
            received[(replica.index - shift) % replicas] = ops.reshape(block, (depth, -1))
        sums.append(_finished(received, spans))
    return replica.all_gather_shards(_joined(ops, sums), [segment] * replicas)


def _sum_for_clients(
    replica: Replica,
    rows: Sequence[Sequence[Tensor]],
    length: int,
    spans: Sequence[Sequence[Subtree]],
    clients: Clients,
) -> Tensor:
    """Sum of the vectors of all subtrees, of which each replica but the clients sums a segment. Collective.

    Block by block: the others exchange their blocks, and then their sums. In between, each of them swaps
    with one client after the other: its own last sum for the client's block. So a client sends each element
    once, and receives it once, but for one block.

    Args:
        replica: The replica that runs this computation.
        rows: Vectors of this replica, as many on each, as consecutive pieces.
        length: Length of each vector, a multiple of the number of blocks of all segments.
        spans: Subtrees of each replica.
        clients: Replicas that sum no segment.
    """
    ops, index = replica.ops, replica.index
    summing = [each for each in range(replica.replicas) if each not in clients]
    own = None if index in clients else summing.index(index)
    segments, depth = len(summing), len(rows)
    client_depth = max(len(spans[client]) for client in clients)
    size = length // (segments * CLIENT_BLOCKS)
    nothing = ops.zeros((size,), rows[0][0].dtype)
    sums: dict[tuple[int, int], Tensor] = {}  # by segment and block
    rotations = [_rotation(replica.replicas, summing, shift) for shift in range(segments)]
    swaps = [_swaps(replica.replicas, summing, clients, turn) for turn in range(segments)]

    def addends(segment: int, block: int, depth: int) -> Tensor:
        """This replica's vectors in a block of a segment, one after the other; zeros after the last block."""
        start = (segment * CLIENT_BLOCKS + block) * size
        if block == CLIENT_BLOCKS:
            return nothing
        return _joined(ops, [_slice(ops, row, start, start + size) for row in rows[:depth]])

    for block in range(CLIENT_BLOCKS + 1):
        is_last = block == CLIENT_BLOCKS  # which brings the clients the last sums
        received: dict[int, Tensor] = {}
        for shift, destinations in enumerate([] if is_last else rotations):
            sent = addends(((own or 0) + shift) % segments, block, depth)
            arrived = replica.send_receive(sent, destinations) if shift else sent
            received[destinations.index(index)] = ops.reshape(arrived, (depth, -1))
        for destinations in swaps:
            partner = destinations[index]
            if own is not None and block and partner != index:
                sent = sums[own, block - 1]
                sent = sent if is_last else _joined(ops, [sent, *[nothing] * (client_depth - 1)])
            else:
                segment = summing.index(partner if own is None else index)
                sent = addends(segment, block, client_depth)
            arrived = replica.send_receive(sent, destinations)
            if own is None and block:
                sums[segment, block - 1] = arrived[:size]
            elif partner != index:
                received[partner] = ops.reshape(arrived, (-1, size))
        if is_last:
            break
        total = nothing if own is None else _finished(received, spans)
        for shift, destinations in enumerate(rotations):
            arrived = replica.send_receive(total, destinations) if shift else total
            if own is not None:
                sums[(own - shift) % segments, block] = arrived
    return ops.concatenate([sums[key] for key in sorted(sums)])


def _rotation(replicas: int, summing: Sequence[int], shift: int) -> list[int]:
    """Destination of each replica where those that sum send to the one so many places on."""
    destinations = list(range(replicas))
    for segment, each in enumerate(summing):
        destinations[each] = summing[(segment + shift) % len(summing)]
    return destinations


def _swaps(replicas: int, summing: Sequence[int], clients: Clients, turn: int) -> list[int]:
    """Destination of each replica where every client swaps with another of those that sum at each turn."""
    destinations = list(range(replicas))
    for number, client in enumerate(clients):
        partner = summing[(number + turn) % len(summing)]
        destinations[client], destinations[partner] = partner, client
    return destinations


def _slice(ops: TensorFunctions, pieces: Sequence[Tensor], start: int, stop: int) -> Tensor:
    """Elements from `start` to `stop` of a vector that consists of pieces; copied if they are in several."""
    spans = spans_of_range([piece.shape[0] for piece in pieces], start, stop)
    return _joined(ops, [pieces[index][first:end] for index, first, end in spans])


def _joined(ops: TensorFunctions, vectors: Sequence[Tensor]) -> Tensor:
    """Concatenation of vectors; of one, itself."""
    return ops.concatenate(vectors) if len(vectors) > 1 else vectors[0]


def _is_by_transfers(length: int, spans: Sequence[Sequence[Subtree]]) -> bool:
    """Whether vectors of this length are sent by `_TRANSFERS`."""
    return spans == _SPANS and length >= LARGE


def _sum_by_transfers(replica: Replica, vectors: Sequence[Sequence[Tensor]], size: int) -> Tensor:
    """Sum of the vectors of all subtrees of 3 replicas, in fewer bytes: segments of one size. Collective."""
    held: list[dict[Subtree, Tensor]] = [
        {
            subtree: _slice(replica.ops, vector, segment * size, (segment + 1) * size)
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


def _subtree_sum(sums: dict[Subtree, Tensor], subtree: Subtree) -> Tensor:
    """Sum of a subtree: vectors of one length. If it is not in `sums` yet, it replaces its halves there."""
    if subtree not in sums:
        first, count = subtree
        half = count // 2
        halves = (first, half), (first + half, half)
        sums[subtree] = operator.add(*(_subtree_sum(sums, each) for each in halves))
        for each in halves:
            del sums[each]
    return sums[subtree]


def _finished(rows: Tensor | Mapping[int, Tensor], spans: Sequence[Sequence[Subtree]]) -> Tensor:
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
