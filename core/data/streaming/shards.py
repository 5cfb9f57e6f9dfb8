"""Shards of a stream: they are read side by side, and what they yield comes in turn, whoever reads them."""

from __future__ import annotations

import contextlib
import copy
import functools
import sys
import time
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, NamedTuple, Protocol

from isotrain.core.data.streaming.sample_streams import (
    HuggingFaceStream,
    LitDataStream,
    MosaicStream,
    adapter_of,
    is_iterable_dataset,
)
from isotrain.core.data.streaming.stream_state import opened
from isotrain.core.errors import DataError
from isotrain.core.quantities import counted

MOST_CHUNK = 16
"""Most samples that are read of a shard at once."""
_CHUNK_SAMPLES = 512
"""Most samples in a process's chunks, one of each shard together, if it has no more shards than that."""
_STATE_SECONDS = 1.0
_END = object()
_NO_SHARDS = (
    "data: shards: {} cannot be told a shard. Give a function of (shard, shards) that returns an iterator"
    " over a shard; an `IterableDataset` of Hugging Face, a data set of LitData, or one that uses torch's"
    " get_worker_info, as WebDataset does; or leave out `shards`."
)
_MOSAIC = (
    "data: shards: the parts of a StreamingDataset of MosaicML Streaming wait for each other, as processes of"
    " torchrun or workers of a DataLoader, so one process cannot read several of them. Leave out `shards`."
)

READ_AGAIN = (
    "data: a stream in shards was read again before this reading of it had ended, and the readers of its"
    " shards serve one reading. Make a stream for each use."
)

ShardStart = tuple[Any, int]
"""State of a shard as JSON values, or None for the start of its next epoch; samples to leave out after it."""


class Chunk(NamedTuple):
    """Samples of a shard that follow each other.

    Attributes:
        samples: The samples.
        is_last: Whether the shard has no more of them in this epoch.
        state: The shard's state before them, as JSON values; None where none was due.
    """

    samples: Sequence[Any]
    is_last: bool
    state: Any


class ShardReader:
    """Reading of one shard in chunks, with its state at most once a second."""

    def __init__(self, shard: Iterable[Any], chunk_size: int) -> None:
        self._shard = shard
        self._chunk_size = chunk_size

    def begin(self, state: Any, skipped: int) -> None:
        """Starts the next epoch of the shard, or continues from a `ShardStart`."""
        self._samples, self._handler = opened(self._shard, state)
        for _ in islice(self._samples, skipped):
            pass
        self._has_given = False
        self._state_time: float | None = None

    def chunk(self) -> Chunk:
        """The next samples; at first one alone, since states are taken between samples."""
        state = self._state() if self._has_given else None
        size = self._chunk_size if self._has_given else 1
        samples = list(islice(self._samples, size))
        self._has_given = True
        return Chunk(samples, len(samples) < size, state)

    def _state(self) -> Any:
        now = time.monotonic()
        is_due = self._state_time is None or now - self._state_time >= _STATE_SECONDS
        if self._handler is None or not is_due:
            return None
        self._state_time = now
        try:
            return self._handler.state()
        except DataError as error:
            self._handler = None
            warnings.warn(str(error), stacklevel=2)
            return None


class ShardReaders(Protocol):
    """Readers of the shards of a stream."""

    def begin(self, shard: int, start: ShardStart) -> None:
        """Starts an epoch of a shard, or continues one."""

    def chunk(self, shard: int) -> Chunk:
        """The next samples of a shard that has begun and not ended."""


class _LocalReaders:
    """Readers of the shards in this process."""

    def __init__(self, samples: ShardedSamples) -> None:
        self._reader = functools.cache(samples.reader)

    def begin(self, shard: int, start: ShardStart) -> None:
        self._reader(shard).begin(*start)

    def chunk(self, shard: int) -> Chunk:
        return self._reader(shard).chunk()


@dataclass
class ShardProgress:
    """Progress in a shard: samples that were read ahead, and the last state with the samples since."""

    state: Any
    since: int
    samples: deque[Any] = field(default_factory=deque)
    is_last: bool = False

    def add(self, chunk: Chunk) -> None:
        """Adds samples that were read."""
        self.samples.extend(chunk.samples)
        self.is_last = chunk.is_last
        if (
            chunk.state is not None and chunk.samples
        ):  # at the end, streams mean this epoch or the next
            self.state, self.since = chunk.state, 0

    def next(self) -> Any:
        """The next of the samples."""
        self.since += 1
        return self.samples.popleft()


class ShardedSamples:
    """Samples of a data set's shards in turn: one of each, without those that have ended.

    Shards may yield batches instead; then a sample is such a batch.

    The order depends on the number of shards, never on how many processes read them. A new iterator takes
    over the readers of the shards: one from before that has not ended raises an error if it is continued.

    Attributes:
        shards: Number of shards.
        lengths: Samples of each shard; None where they are not known. If they are, global batches are those
            of a `ShardSchedule` instead.
        readers: Readers of the shards; this process, unless they are set.
        reading: The reading by lengths that was begun last.
    """

    def __init__(
        self,
        dataset: Any,
        shards: int,
        lengths: Sequence[int] | None = None,
        most_chunk: int = MOST_CHUNK,
    ) -> None:
        """Reads nothing.

        Args:
            dataset: An `IterableDataset` that can be told a shard, or a function of (shard, shards).
            shards: Number of shards.
            lengths: Samples of each shard, if they are known.
            most_chunk: Most samples that are read of a shard at once.

        Raises:
            DataError: The data set cannot be told a shard, has not so many of them, or not so many lengths.
        """
        if shards < 1:
            raise DataError(f"data: shards: expected at least 1, received {shards}.")
        if lengths is not None and (len(lengths) != shards or min(lengths) < 0 or not sum(lengths)):
            raise DataError(
                f"sample_stream: samples: expected one number for each of {counted(shards, 'shard')},"
                f" received {lengths!r:.80}."
            )
        self._make_shard = _shards_of(dataset, shards)
        self.shards = shards
        self.lengths = lengths
        self._most_chunk = most_chunk
        self.readers: ShardReaders = _LocalReaders(self)
        self.reading: object = None
        self._progress: list[ShardProgress] = []
        self._turn: deque[int] = deque()
        self._loaded: Mapping[str, Any] | None = None

    def reader(self, shard: int, processes: int = 1) -> ShardReader:
        """A reader of one shard, where so many processes read all; chunks are smaller with many shards."""
        chunk_size = min(self._most_chunk, max(1, _CHUNK_SAMPLES * processes // self.shards))
        return ShardReader(self._make_shard(shard), chunk_size)

    def __iter__(self) -> Iterator[Any]:
        """Starts the next epoch, or goes on with that of a loaded state."""
        loaded, self._loaded = self._loaded, None
        starts = [(None, 0)] * self.shards if loaded is None else loaded["starts"]
        self._turn = deque(range(self.shards) if loaded is None else loaded["turn"])
        self._progress = [ShardProgress(*start) for start in starts]
        for shard, start in enumerate(starts):
            self.readers.begin(shard, start)
        for shard in set(range(self.shards)).difference(self._turn):
            self.readers.chunk(shard)  # its end, after which a data set may prepare its next epoch
        return self._samples(self._turn)

    def _samples(self, turn: deque[int]) -> Iterator[Any]:
        while turn:
            if turn is not self._turn:
                raise DataError(READ_AGAIN)
            shard = turn[0]
            progress = self._progress[shard]
            if not progress.samples and progress.is_last:
                turn.popleft()
            elif not progress.samples:
                progress.add(self.readers.chunk(shard))
            else:
                turn.rotate(-1)
                yield progress.next()

    def state_dict(self) -> dict[str, Any] | None:
        """The shards in turn, and the position in each; None if a shard has no state."""
        if any(each.state is None for each in self._progress):
            return None
        starts = [(each.state, each.since) for each in self._progress]
        return {"starts": starts, "turn": list(self._turn)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Makes the next iteration go on from a state.

        Raises:
            DataError: It is of another number of shards.
        """
        if len(state["starts"]) != self.shards:
            raise DataError(
                f"data: the stream was read in {len(state['starts'])} shards when the checkpoint was saved,"
                f" and now in {self.shards}, which is another order. Give as many `shards` as before."
            )
        self._loaded = state


def _shards_of(dataset: Any, shards: int) -> Callable[[int], Iterable[Any]]:
    """A function that makes a shard by its index."""
    if callable(dataset) and not hasattr(dataset, "__iter__"):
        return lambda shard: _FunctionShard(dataset, shard, shards)
    adapter = adapter_of(dataset)
    if adapter is HuggingFaceStream:
        if dataset.num_shards < shards:
            raise DataError(
                f"data: shards={shards}, and the data set has {dataset.num_shards}. Give at"
                " most as many."
            )
        return lambda shard: HuggingFaceStream(dataset.shard(num_shards=shards, index=shard))
    if adapter is LitDataStream:
        return lambda shard: LitDataStream(dataset, shard, shards)
    if adapter is MosaicStream:
        raise DataError(_MOSAIC)
    if adapter is None and is_iterable_dataset(dataset):
        return lambda shard: _WorkerShard(copy.deepcopy(dataset), shard, shards)
    raise DataError(_NO_SHARDS.format(type(dataset).__name__))


@dataclass(frozen=True)
class _FunctionShard:
    """A shard whose samples a function returns in every epoch."""

    function: Callable[[int, int], Iterable[Any]]
    shard: int
    shards: int

    def __iter__(self) -> Iterator[Any]:
        return iter(self.function(self.shard, self.shards))


class _WorkerShard:
    """A shard of an `IterableDataset` that takes it from torch's `get_worker_info`."""

    def __init__(self, dataset: Any, shard: int, shards: int) -> None:
        self._dataset = dataset
        self._info = _WorkerInfo(shard, shards, dataset)

    def __iter__(self) -> Iterator[Any]:
        with self._info.set():
            samples = iter(self._dataset)
        while True:
            with self._info.set():
                sample = next(samples, _END)
            if not self._info.was_read and self._info.num_workers > 1:
                raise DataError(
                    f"data: {type(self._dataset).__name__} does not ask torch's get_worker_info for its"
                    " shard, so every shard would have all samples. Leave out `shards`, or take every"
                    " `info.num_workers`-th file from `info.id` on."
                )
            if sample is _END:
                return
            yield sample

    def __getattr__(self, name: str) -> Any:
        """Methods of the data set's state."""
        return getattr(self._dataset, name)


class _WorkerInfo:
    """Result of torch's `get_worker_info` in a shard, which notes whether it was read."""

    def __init__(self, shard: int, shards: int, dataset: Any) -> None:
        self._id = shard
        self.num_workers = shards
        self.seed = 0
        self.dataset = dataset
        self.was_read = False

    @property
    def id(self) -> int:
        """Index of the shard."""
        self.was_read = True
        return self._id

    @contextlib.contextmanager
    def set(self) -> Iterator[None]:
        """Context in which `get_worker_info` returns this."""
        worker: Any = sys.modules["torch.utils.data._utils.worker"]
        before, worker._worker_info = worker._worker_info, self
        try:
            yield
        finally:
            worker._worker_info = before
