"""Shares of the replicas in each global batch, by their measured speed (`shares` of the spec)."""

from __future__ import annotations

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

    The step of a process takes the seconds of its parts, and those of the rest, which are the same for any
    number of parts. The parts end when the process arrives at the exchange; reading data and callbacks count
    too. The rest is from the end of the exchange to that of the step. Taken for time of the parts, it would
    make a process with few of them seem slow, also when it is as fast as the others again. Replicas of one
    process have one speed. A global batch for which peers of different speed accumulate: Diskin et al.,
    "Distributed Deep Learning in Open Collaborations", arXiv 2106.10207.

    Attributes:
        counts: Number of parts of each replica, one at least; the same on all processes.
        clients: Replicas that only send and receive in the exchange, as their links are slow; as above.
    """

    def __init__(
        self, group: ReplicaGroup, parts: int, every: int, clients: tuple[int, ...] = ()
    ) -> None:
        """Deals the parts equally.

        Args:
            group: Replica group of this process.
            parts: Number of parts of a global batch, at least that of replicas.
            every: Steps between two dealings.
            clients: Replicas whose links are slow.
        """
        self.clients = clients
        self.counts = equal_part_counts(parts, group.replicas)
        self._group = group
        self._every = every
        self._measured: list[tuple[float, float]] = []
        """Seconds of a part, and of the rest, in each step since the last dealing."""
        self._since: float | None = None
        self._part_seconds = 0.0
        """Seconds of a part in the present step."""

    @contextmanager
    def exchanging(self, batch: Batch) -> Iterator[None]:
        """Context of the exchange of a step, in which processes wait for the slower ones. Local."""
        self._group.synchronize_device()
        if self._since is not None and batch.part_counts is not None:
            parts = max(batch.part_counts[replica] for replica in self._group.local_replicas)
            parts += batch.verified is not None
            self._part_seconds = max(clock() - self._since, 1e-9) / parts
        yield
        self._group.synchronize_device()
        self._since = clock()

    def step_done(self) -> bool:
        """Ends the measurement of a step, and deals the parts anew after every so many. Collective.

        Returns:
            Whether `counts` has changed, the same on all processes.
        """
        self._group.synchronize_device()
        since, self._since = self._since, clock()
        if since is not None and self._part_seconds:
            self._measured.append((self._part_seconds, self._since - since))
        if len(self._measured) < self._every:
            return False
        local = np.zeros((self._group.replicas, 2))
        local[list(self._group.local_replicas)] = np.median(self._measured, 0)
        self._measured.clear()
        maxima = self._group.all_reduce_max(local.ravel().tolist())
        seconds, rests = maxima[::2], maxima[1::2]
        counts = dealt_by_speed(sum(self.counts), seconds, rests)
        gains = _longest(self.counts, seconds, rests) > _GAIN * _longest(counts, seconds, rests)
        if gains:
            self.counts = counts
        return gains


def dealt_by_speed(parts: int, seconds: Sequence[float], rests: Sequence[float]) -> tuple[int, ...]:
    """Number of parts of each replica, one at least, with which the last one is done soonest.

    Args:
        parts: Number of parts, at least that of replicas.
        seconds: Seconds of a part on each replica, above 0.
        rests: Seconds of the rest of a step on each replica.
    """
    counts = [1] * len(seconds)
    for _ in range(parts - len(seconds)):
        done = [rest + (n + 1) * each for n, each, rest in zip(counts, seconds, rests, strict=True)]
        counts[done.index(min(done))] += 1
    return tuple(counts)


def _longest(counts: Sequence[int], seconds: Sequence[float], rests: Sequence[float]) -> float:
    """Seconds in which all replicas have computed their parts and the rest of the step."""
    return max(rest + n * each for n, each, rest in zip(counts, seconds, rests, strict=True))
