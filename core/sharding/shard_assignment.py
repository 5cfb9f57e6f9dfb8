"""Which replica updates which weights, and in which buckets gradients and weights travel."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Bucket:
    """Weights that travel together.

    Attributes:
        weights: Their places among all trainable weights, sorted by the replica that updates them.
        sizes: Of the numbers that each replica updates of them.
        counts: Of the weights that each replica updates of them.
    """

    weights: tuple[int, ...]
    sizes: tuple[int, ...]
    counts: tuple[int, ...]

    def weights_of(self, replica: int) -> tuple[int, ...]:
        """Those that a replica updates."""
        start = sum(self.counts[:replica])
        return self.weights[start : start + self.counts[replica]]


@dataclass(frozen=True)
class ShardAssignment:
    """Trainable weights, shared out among replicas.

    Attributes:
        owners: Of each weight, the replica that updates it.
        sizes: Of each weight, its numbers.
    """

    owners: tuple[int, ...]
    sizes: tuple[int, ...]
    replicas: int

    @property
    def shard_sizes(self) -> tuple[int, ...]:
        """The numbers that each replica updates."""
        found = [0] * self.replicas
        for owner, size in zip(self.owners, self.sizes, strict=True):
            found[owner] += size
        return tuple(found)

    def buckets(self, limit: int) -> tuple[Bucket, ...]:
        """Cuts the weights, from the last to the first, as backward passes go, into buckets.

        Args:
            limit: Numbers in a bucket; a weight with more has one for itself.
        """
        found: list[list[int]] = []
        filled = limit
        for place in reversed(range(len(self.sizes))):
            if filled + self.sizes[place] > limit:
                found.append([])
                filled = 0
            found[-1].append(place)
            filled += self.sizes[place]
        return tuple(map(self._bucket, found))

    def _bucket(self, places: Sequence[int]) -> Bucket:
        of_each = [
            [place for place in places if self.owners[place] == replica]
            for replica in range(self.replicas)
        ]
        return Bucket(
            tuple(place for own in of_each for place in own),
            tuple(sum(self.sizes[place] for place in own) for own in of_each),
            tuple(map(len, of_each)),
        )


def assign_shards(sizes: Sequence[int], replicas: int) -> ShardAssignment:
    """Shares weights out: the largest first, each to the replica that has least so far.

    It depends on its arguments alone, so that every process comes to the same.

    Args:
        sizes: Of each weight, its numbers.
        replicas: How many.
    """
    owners, filled = [0] * len(sizes), [0] * replicas
    for place in sorted(range(len(sizes)), key=lambda place: (-sizes[place], place)):
        owner = min(range(replicas), key=lambda replica: (filled[replica], replica))
        owners[place] = owner
        filled[owner] += sizes[place]
    return ShardAssignment(tuple(owners), tuple(sizes), replicas)
