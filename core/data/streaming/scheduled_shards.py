"""Global batches of shards of known lengths, of which each process reads the shards that it needs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import islice
from typing import Any

import numpy as np
from numpy.typing import NDArray

from isotrain.core.data.streaming.rebatch import fingerprint
from isotrain.core.data.streaming.shards import (
    MOST_CHUNK,
    READ_AGAIN,
    ShardedSamples,
    ShardProgress,
)
from isotrain.core.data.streaming.stream_epoch import ReadCount
from isotrain.core.data.streaming.stream_state import StreamState
from isotrain.core.errors import DataError

_OTHER_LENGTHS = (
    "data: the shards of the stream have other lengths than when the checkpoint was saved, which is another"
    " order. Give sample_stream the same `shards` and `samples` as before."
)
_LENGTH = (
    "data: shard {} of the stream gave {} samples in an epoch, expected {}, which is what `samples` of"
    " sample_stream says."
)


class ShardSchedule:
    """Samples of each shard in the global batches of a stream, as a pure function of the lengths.

    In any stretch of an epoch each shard has as many samples as its length demands. Within a global batch
    samples are in the order of the shards, so that neighbours in it are of few shards.

    Attributes:
        lengths: Number of samples of each shard, int64 [shards].
        samples: Number of samples of all.
        checksum: Checksum of the lengths.
    """

    def __init__(self, lengths: Sequence[int]) -> None:
        """Keeps the number of samples of each shard."""
        self.lengths: NDArray[np.int64] = np.asarray(lengths, np.int64)
        self.samples = int(self.lengths.sum())
        self._shards = len(lengths)
        self.checksum = fingerprint((self.lengths, None))

    def counts(self, samples: int) -> NDArray[np.int64]:
        """Number of samples of each shard among the first so many of the stream, over all epochs."""
        epochs, rest = divmod(samples, self.samples)
        counts: NDArray[np.int64] = epochs * self.lengths + self._counts_in_epoch(rest)
        return counts

    def _counts_in_epoch(self, samples: int) -> NDArray[np.int64]:
        """The same in one epoch, in which sample i of n in a shard is due at (i + 1/2) / n of the epoch.

        Those that are due at the same time come in the order of the shards. At each time as many are due as
        the time demands, up to half a sample of each shard; so only those of around that time are sorted.
        """
        before, after = (self._due(samples + margin) for margin in (-self._shards, self._shards))
        counts = after - before
        shards = np.repeat(np.arange(self._shards), counts)
        positions = np.arange(len(shards)) + np.repeat(before - np.cumsum(counts) + counts, counts)
        in_order = np.argsort((positions + 0.5) / self.lengths[shards], kind="stable")
        chosen = shards[in_order[: samples - before.sum()]]
        return before + np.bincount(chosen, minlength=self._shards)

    def _due(self, samples: int) -> NDArray[np.int64]:
        """Number of samples of each shard that are due when so many of all should be."""
        due = np.floor(samples / self.samples * self.lengths + 0.5).astype(np.int64)
        clipped: NDArray[np.int64] = np.clip(due, 0, self.lengths)
        return clipped


def joined_states(state: StreamState, others: Iterable[StreamState]) -> StreamState:
    """A state with the states of the shards of all readers of a stream, each as far as any has read it."""
    furthest: dict[int, Any] = {}
    for each in (state, *others):
        for shard, *start in each.state["shards"]:
            if shard not in furthest or start[-1] > furthest[shard][-1]:
                furthest[shard] = start
    shards = [[shard, *start] for shard, start in furthest.items()]
    return replace(state, state={**state.state, "shards": shards})


class ScheduledReading:
    """One reading of shards of known lengths, each from when it is first needed.

    Attributes:
        schedule: The schedule of the shards.
    """

    def __init__(self, shards: ShardedSamples, stream_state: StreamState | None) -> None:
        """Begins no shard.

        Args:
            shards: The shards.
            stream_state: State of some of them; the others are read from their start.

        Raises:
            DataError: The state is of shards of other lengths.
        """
        assert shards.lengths is not None
        self._shards = shards
        self.schedule = ShardSchedule(shards.lengths)
        self._samples: dict[int, Iterator[Any]] = {}  # of each shard that has begun
        self._positions: dict[int, int] = {}  # how many of these were read
        self._progress: dict[int, ShardProgress] = {}
        self._saved: dict[int, tuple[Any, int, int]] = {}
        if stream_state is not None:
            saved = stream_state.state
            if not isinstance(saved, dict) or saved.get("lengths") != self.schedule.checksum:
                raise DataError(_OTHER_LENGTHS)
            self._saved = {shard: tuple(start) for shard, *start in saved["shards"]}
        self._shards.reading = self

    def rows(self, start: int, stop: int, rows: slice, count: ReadCount) -> list[Any]:
        """Rows of the global batch of the samples from `start` to `stop`; adds to the count what is read.

        Raises:
            DataError: A shard has another length, or another reading has begun.
        """
        before, after = self.schedule.counts(start), self.schedule.counts(stop)
        ends = np.cumsum(after - before)  # rows in the global batch, by shard
        first = before + np.maximum(rows.start - (ends - (after - before)), 0)
        last = after - np.maximum(ends - rows.stop, 0)
        samples: list[Any] = []
        for shard in np.flatnonzero(first < last).tolist():
            samples += self._take(shard, int(first[shard]), int(last[shard]), count)
        return samples

    def _take(self, shard: int, start: int, stop: int, count: ReadCount) -> list[Any]:
        """Samples of a shard, by their positions over all epochs; those before are read, and left out.

        Raises:
            DataError: The shard has another length, or another reading has begun.
        """
        if self._shards.reading is not self:
            raise DataError(READ_AGAIN)
        if shard not in self._samples:
            self._positions[shard] = self._saved.get(shard, (None, 0, 0))[2]
            self._samples[shard] = self._samples_of(shard)
        for position in range(self._positions[shard], start, MOST_CHUNK):
            self._read(shard, min(position + MOST_CHUNK, start), count)
        return self._read(shard, stop, count)

    def _read(self, shard: int, stop: int, count: ReadCount) -> list[Any]:
        """The next samples of a shard, up to a position."""
        samples = list(islice(self._samples[shard], stop - self._positions[shard]))
        self._positions[shard] = stop
        count.add_samples(samples)
        return samples

    def state(self, samples: int) -> StreamState:
        """The states and positions of the shards that have begun, where so many samples were read of all."""
        starts = dict(self._saved)
        for shard, progress in self._progress.items():
            if progress.state is not None:
                starts[shard] = progress.state, progress.since, self._positions[shard]
        shards = [[shard, *start] for shard, start in starts.items()]
        return StreamState(0, samples, {"lengths": self.schedule.checksum, "shards": shards}, 0)

    def _samples_of(self, shard: int) -> Iterator[Any]:
        """The samples of a shard from its saved position on, read again where they end."""
        length = int(self.schedule.lengths[shard])
        state, since, position = self._saved.get(shard, (None, 0, 0))
        remaining = -position % length if position else length
        while True:
            self._progress[shard] = progress = ShardProgress(state, since)
            self._shards.readers.begin(shard, (state, since))
            for number in range(length - remaining, length):
                self._read_ahead(shard, progress)
                if not progress.samples:
                    raise DataError(_LENGTH.format(shard, number, length))
                sample = progress.next()
                if number == length - 1:
                    self._read_end(shard, progress)
                yield sample
            if remaining == 0:
                self._read_end(shard, progress)
            state, since, remaining = None, 0, length

    def _read_end(self, shard: int, progress: ShardProgress) -> None:
        """Reads past the last sample, so that what a data set does after it is done before the next epoch.

        Raises:
            DataError: The shard has more samples.
        """
        self._read_ahead(shard, progress)
        if progress.samples:
            length = self.schedule.lengths[shard]
            raise DataError(_LENGTH.format(shard, f"more than {length}", length))

    def _read_ahead(self, shard: int, progress: ShardProgress) -> None:
        if not progress.samples and not progress.is_last:
            progress.add(self._shards.readers.chunk(shard))
