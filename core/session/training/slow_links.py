"""Replicas whose links are slow, so that the others sum for them (`shares` of the spec)."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence

import numpy as np

from isotrain.core.contracts.backend.replica import Replica, Tensor
from isotrain.core.contracts.backend.replica_group import ReplicaGroup
from isotrain.core.contracts.backend.tree_sum import CLIENT_BLOCKS

clock = time.perf_counter
"""Function that returns seconds."""

PROBE = 1 << 16
"""Elements (float32) that two replicas swap to measure their links; models with fewer are not measured."""
_REPEATS = 3
_MOST_PARTNERS = 8
"""Number of replicas with which each swaps at most."""
_GAIN = 1.1
"""Factor by which an exchange must become shorter for others to sum for one more replica."""


def replicas_with_slow_links(group: ReplicaGroup) -> tuple[int, ...]:
    """Measures the links of all processes, and returns replicas that should sum no segment. Collective.

    Two replicas at a time swap a vector, in turn with several others. A link is as fast as its fastest swap,
    as the partner's link may be the slower one.

    Returns:
        Indices, ascending, for `sum_over_replicas`; the same on all processes.
    """
    elements = sum(math.prod(info.shape) for info in group.describe_state(("trainable",)).values())
    if group.replicas < 3 or len(group.local_replicas) == group.replicas or elements < PROBE:
        return ()
    vectors = [group.tensor(np.zeros(PROBE, np.float32))] * len(group.local_replicas)
    fastest = math.inf
    for partners in list(pairings(group.replicas))[:_MOST_PARTNERS]:
        for repeat in range(1 + _REPEATS):  # the first one waits for the partner to arrive
            start = clock()
            group.numpy(group.compute(swap, vectors, static=partners)[0])
            if repeat and any(partners[each] != each for each in group.local_replicas):
                fastest = min(fastest, clock() - start)
    seconds = np.zeros(group.replicas)
    seconds[list(group.local_replicas)] = fastest
    return slower_ones(group.all_reduce_max(seconds.tolist()))


def swap(replica: Replica, vector: Tensor, *, static: tuple[int, ...]) -> Tensor:
    """The vector of this replica's partner; its own without one. Collective."""
    return replica.send_receive(vector, static)


def pairings(replicas: int) -> Iterator[tuple[int, ...]]:
    """The partner of each replica, by turns with each other one; of an odd number, one is its own."""
    even = replicas + replicas % 2
    for turn in range(even - 1):
        circle = [0, *((turn + place) % (even - 1) + 1 for place in range(even - 1))]
        partners = list(range(replicas))
        for one, other in zip(circle[: even // 2], reversed(circle), strict=False):
            if max(one, other) < replicas:
                partners[one], partners[other] = other, one
        yield tuple(partners)


def slower_ones(seconds: Sequence[float]) -> tuple[int, ...]:
    """Replicas for which the others should sum, so that the exchange of gradients is the shortest.

    Args:
        seconds: Seconds in which each replica sends and receives so many bytes.
    """
    replicas = len(seconds)
    by_speed = sorted(range(replicas), key=lambda each: (-seconds[each], each))
    shortest = 2 * (replicas - 1) / replicas * max(seconds)
    chosen: tuple[int, ...] = ()
    for count in range(1, replicas // 2 + 1):
        others = replicas - count
        of_clients = (1 + 1 / CLIENT_BLOCKS) * seconds[by_speed[0]]
        total = of_clients + 2 * (others - 1) / others * seconds[by_speed[count]]
        if _GAIN * total < shortest:
            shortest, chosen = total, tuple(sorted(by_speed[:count]))
    return chosen
