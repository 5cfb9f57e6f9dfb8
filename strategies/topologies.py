"""Communication graphs of replicas, as permutations: the receiver of each replica, round by round.

A mixing step is x_i <- w x_i + w (sum of what i received), with w = 1 / (rounds + 1). Its matrix is the
mean of the identity and the rounds' permutation matrices, and so doubly stochastic whatever the graph
(Birkhoff): rows and columns sum up to 1, and the mean over the replicas is invariant.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterable

from isotrain.plugin import PlanError

Permutation = tuple[int, ...]
"""The receiver of each replica, by the index of the sender."""

Rounds = tuple[Permutation, ...]
"""The rounds of one mixing step."""

GRAPHS = ("ring", "torus", "exponential", "one-peer-exponential", "random", "complete")


def mixings(graph: str, replicas: int, degree: int, seed: int) -> tuple[Rounds, ...]:
    """The mixing steps of a graph, to use in turn; most graphs have one.

    Args:
        graph: One of `GRAPHS`; also `complete`, although an all-reduce is faster.
        replicas: Number of replicas in the run.
        degree: random: number of neighbours of each replica; even.
        seed: random: seed of the graph.

    Raises:
        PlanError: There is no such graph of this number of replicas.
    """
    if graph == "ring":
        return (_distinct(_shift(replicas, step) for step in (1, -1)),)
    if graph == "torus":
        return (_torus(replicas),)
    if graph == "complete":
        return (_distinct(_shift(replicas, step) for step in range(1, replicas)),)
    if graph == "random":
        return (_random(replicas, degree, seed),)
    hops = [1 << power for power in range(max(1, math.ceil(math.log2(replicas))))]
    if graph == "exponential":
        return (_distinct(_shift(replicas, hop) for hop in hops),)
    return tuple(_distinct([_shift(replicas, hop)]) for hop in hops)


def matrix(rounds: Rounds, replicas: int) -> list[list[float]]:
    """The mixing matrix, shape [replicas, replicas]: row i has the weights of all values in replica i's."""
    weight = 1 / (len(rounds) + 1)
    result = [[weight * (i == j) for j in range(replicas)] for i in range(replicas)]
    for permutation in rounds:
        for sender, receiver in enumerate(permutation):
            result[receiver][sender] += weight
    return result


def _shift(replicas: int, step: int) -> Permutation:
    return tuple((replica + step) % replicas for replica in range(replicas))


def _distinct(permutations: Iterable[Permutation]) -> Rounds:
    """Each permutation once, without those that send a replica's values to itself."""
    return tuple(p for p in dict.fromkeys(permutations) if all(i != j for i, j in enumerate(p)))


def _torus(replicas: int) -> Rounds:
    """Right, left, down and up in a grid that is as square as possible."""
    rows = max(d for d in range(1, math.isqrt(replicas) + 1) if replicas % d == 0)
    if rows == 1:
        raise PlanError(
            f"strategy gossip: graph torus needs replicas = rows * columns with both at least 2,"
            f" received {replicas}. Use ring, or another number of replicas."
        )
    columns = replicas // rows
    along = [
        tuple(r // columns * columns + (r + step) % columns for r in range(replicas))
        for step in (1, -1)
    ]
    across = [_shift(replicas, step * columns) for step in (1, -1)]
    return _distinct([*along, *across])


def _random(replicas: int, degree: int, seed: int) -> Rounds:
    """Random cycles through all replicas, in both directions: a connected graph."""
    if degree % 2 or not 2 <= degree < replicas:
        raise PlanError(
            f"strategy gossip: degree: expected an even number from 2 to {replicas - 1} for a random"
            f" graph (replicas: {replicas}), received {degree}."
        )
    generator = random.Random(seed)
    permutations: list[Permutation] = []
    for _ in range(degree // 2):
        cycle = generator.sample(range(replicas), replicas)
        successors = dict(zip(cycle, [*cycle[1:], cycle[0]], strict=True))
        predecessors = {receiver: sender for sender, receiver in successors.items()}
        permutations += [
            tuple(receivers[replica] for replica in range(replicas))
            for receivers in (successors, predecessors)
        ]
    return _distinct(permutations)
