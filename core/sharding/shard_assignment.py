"""Assigns whole weights to replicas (ZeRO stages 1 and 2), and groups them in communication buckets."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Bucket:
    """Weights whose gradients or values are sent together.

    Attributes:
        weights: Indices among all trainable weights, grouped by the replica that updates them.
        sizes: Number of elements of these weights that each replica updates.
        counts: Number of these weights that each replica updates.
    """

    weights: tuple[int, ...]
    sizes: tuple[int, ...]
    counts: tuple[int, ...]

    def weights_of(self, replica: int) -> tuple[int, ...]:
        """Indices of the weights in the bucket that a replica updates."""
        start = sum(self.counts[:replica])
        return self.weights[start : start + self.counts[replica]]


@dataclass(frozen=True)
class ShardAssignment:
    """The replica that updates each trainable weight.

    Attributes:
        owners: Index of the replica that updates each weight.
        sizes: Number of elements of each weight.
        replicas: Number of replicas.
    """

    owners: tuple[int, ...]
    sizes: tuple[int, ...]
    replicas: int

    @property
    def shard_sizes(self) -> tuple[int, ...]:
        """Number of elements that each replica updates."""
        totals = [0] * self.replicas
        for owner, size in zip(self.owners, self.sizes, strict=True):
            totals[owner] += size
        return tuple(totals)

    def buckets(self, limit: int) -> tuple[Bucket, ...]:
        """Groups the weights in buckets, from the last weight to the first, in backward-pass order.

        Args:
            limit: Maximum number of elements in a bucket; a larger weight has a bucket to itself.
        """
        buckets: list[list[int]] = []
        elements = limit
        for index in reversed(range(len(self.sizes))):
            if elements + self.sizes[index] > limit:
                buckets.append([])
                elements = 0
            buckets[-1].append(index)
            elements += self.sizes[index]
        return tuple(map(self._bucket, buckets))

    def _bucket(self, weights: Sequence[int]) -> Bucket:
        by_replica = [
            [index for index in weights if self.owners[index] == replica]
            for replica in range(self.replicas)
        ]
        return Bucket(
            tuple(index for indices in by_replica for index in indices),
            tuple(sum(self.sizes[index] for index in indices) for indices in by_replica),
            tuple(map(len, by_replica)),
        )


def assign_shards(sizes: Sequence[int], replicas: int) -> ShardAssignment:
    """Assigns weights to replicas: the largest first, each to the least loaded (LPT: Graham 1969).

    Depends on its arguments alone, so the result is equal on every process.
    """
    owners, totals = [0] * len(sizes), [0] * replicas
    for index in sorted(range(len(sizes)), key=lambda index: (-sizes[index], index)):
        owner = min(range(replicas), key=lambda replica: (totals[replica], replica))
        owners[index] = owner
        totals[owner] += sizes[index]
    return ShardAssignment(tuple(owners), tuple(sizes), replicas)
