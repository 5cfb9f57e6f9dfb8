"""Shares of the replicas in each global batch, by their measured speed (`shares` of the spec)."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np

from isotrain.core.contracts.backend.replica_group import ReplicaGroup
from isotrain.core.data.batch import Batch
from isotrain.core.data.sampler import equal_part_counts

clock = time.perf_counter
"""Function that returns seconds."""

_GAIN = 1.05
"""Factor by which steps must become shorter for parts to be dealt anew, which reads data ahead again."""


class PartShares:
    """Number of parts of the global batch that each replica computes, by its speed.

    Which samples are in a global batch and in a part stays the same, and so do the bits of all sums.

    The speed of a process is the number of its parts by the seconds from the end of one exchange to its
    arrival at the next one: reading data, callbacks and updates count too. Replicas of one process have one
    speed. A global batch for which peers of different speed accumulate: Diskin et al., "Distributed Deep
    Learning in Open Collaborations", arXiv 2106.10207.

    Attributes:
        counts: Number of parts of each replica, one at least; the same on all processes.
    """

    def __init__(self, group: ReplicaGroup, parts: int, every: int) -> None:
        """Deals the parts equally.

        Args:
            group: Replica group of this process.
            parts: Number of parts of a global batch, at least that of replicas.
            every: Steps between two dealings.
        """
        self.counts = equal_part_counts(parts, group.replicas)
        self._group = group
        self._every = every
        self._speeds: list[float] = []
        """Parts by second in the steps since the last dealing."""
        self._since: float | None = None

    @contextmanager
    def exchanging(self, batch: Batch) -> Iterator[None]:
        """Context of the exchange of a step, in which processes wait for the slower ones. Local."""
        self._group.synchronize_device()
        if self._since is not None and batch.part_counts is not None:
            parts = max(batch.part_counts[replica] for replica in self._group.local_replicas)
            self._speeds.append(parts / max(clock() - self._since, 1e-9))
        yield
        self._group.synchronize_device()
        self._since = clock()

    def deal(self) -> bool:
        """Deals the parts anew after every so many steps. Collective.

        Returns:
            Whether `counts` has changed, the same on all processes.
        """
        if len(self._speeds) < self._every:
            return False
        local = np.zeros(self._group.replicas)
        local[list(self._group.local_replicas)] = statistics.median(self._speeds)
        self._speeds.clear()
        speeds = self._group.all_reduce_max(local.tolist())
        counts = dealt_by_speed(sum(self.counts), speeds)
        gains = _longest(self.counts, speeds) > _GAIN * _longest(counts, speeds)
        if gains:
            self.counts = counts
        return gains


def dealt_by_speed(parts: int, speeds: Sequence[float]) -> tuple[int, ...]:
    """Number of parts of each replica, one at least, with which the slowest is done soonest.

    Args:
        parts: Number of parts, at least that of replicas.
        speeds: Parts by second of each replica, above 0.
    """
    counts = [1] * len(speeds)
    for _ in range(parts - len(speeds)):
        seconds = [(count + 1) / speed for count, speed in zip(counts, speeds, strict=True)]
        counts[seconds.index(min(seconds))] += 1
    return tuple(counts)


def _longest(counts: Sequence[int], speeds: Sequence[float]) -> float:
    """Seconds in which all replicas have computed their parts."""
    return max(count / speed for count, speed in zip(counts, speeds, strict=True))
