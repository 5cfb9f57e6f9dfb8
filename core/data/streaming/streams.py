"""Streams: batches of user-defined loaders, in the loader's order, equal on every process."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import numpy as np

from isotrain.core.data.arrays import InputsAndTargets, as_array, as_inputs_and_targets
from isotrain.core.data.collate import NO_SAMPLES, Collate, Collator
from isotrain.core.data.pytree import leaves, map_tree
from isotrain.core.data.streaming.py_dataset import PyDatasetReader, is_py_dataset
from isotrain.core.data.streaming.rebatch import as_batch
from isotrain.core.data.streaming.sample_streams import batches_of, is_iterable_dataset
from isotrain.core.data.streaming.shards import ShardedSamples
from isotrain.core.data.streaming.stream_epoch import (
    Batched,
    Change,
    ReadCount,
    StreamEpoch,
    rows_of,
)
from isotrain.core.data.streaming.stream_state import StreamState
from isotrain.core.errors import DataError

MOST_BYTES = 64 * 1024**2
"""Largest first epoch to keep in memory, in bytes."""
_COUNTED_TOGETHER = 64
"""Samples of a stream of samples that are made a batch while counting."""
_PADDED_UNCOUNTED = (
    "collate: samples of a stream are padded to the width of their global batch, so none can be read ahead to"
    " count them. Give their number, isotrain.sources.sample_stream(..., samples=N), or `epoch_steps`."
)
SILENT_SECONDS = 10.0
"""Seconds of counting samples before a warning: only the user knows whether the stream ends."""
_STILL_COUNTING = (
    "data: the stream is still being read to count its samples, {} so far. For one that never ends, set"
    " `epoch_steps` in the spec: the number of steps that count as an epoch. For a large one, give the number"
    " of samples per epoch, isotrain.sources.stream(batches, samples=N). Then nothing is read to count them."
)
_NEVER_ENDS = (
    "data: the tf.data.Dataset never ends. Set `epoch_steps` in the spec, the number of steps that count as"
    " an epoch; or leave out repeat(), or add take(n)."
)


class FirstEpoch:
    """The first epoch, read ahead to count its samples.

    It is kept, since a stream that shuffles itself or draws random numbers yields another epoch next time.

    Attributes:
        samples: Number of samples in it.
        batches: Copies of its batches, as streams may reuse their arrays; None if it is too large.
    """

    def __init__(self, batches: Iterable[Any], count: ReadCount) -> None:
        """Reads all batches, and counts them."""
        self.samples = 0
        self.batches: list[Any] | None = []
        free_bytes = MOST_BYTES
        silent_until = time.monotonic() + SILENT_SECONDS
        for batch in batches:
            self.samples += rows_of(batch)
            count.add(batch)
            if time.monotonic() > silent_until:
                silent_until = float("inf")
                warnings.warn(_STILL_COUNTING.format(self.samples), stacklevel=2)
            if self.batches is not None:
                copy, size = _copy_batch(batch)
                free_bytes -= size
                if copy is None or free_bytes < 0:
                    self.batches = None
                else:
                    self.batches.append(copy)


def _copy_batch(batch: Any) -> tuple[Any, int]:
    """A copy of a batch as arrays, and their bytes; None where it cannot be converted to arrays."""
    try:
        inputs, targets = as_inputs_and_targets(batch, "a batch of the stream")
        copy = map_tree(_copy_array, (inputs, targets))
    except DataError:
        return None, 0
    return copy, sum(array.nbytes for _, array in leaves(copy, "") if array is not None)


def _copy_array(leaf: Any) -> Any:
    return None if leaf is None else np.copy(as_array(leaf))


_READ_AGAIN = (
    "data: the stream was read to count its samples, and is too large to keep (64 MiB): training begins with"
    " its second epoch, which differs if it shuffles itself or draws random numbers. Give the number of"
    " samples per epoch, isotrain.sources.stream(batches, samples=N); then nothing is read to count them"
)


class BatchStream:
    """A source of batches of any sizes, read again in every epoch and re-batched to global batches.

    Every process reads the whole stream, and takes the local batches of its replicas. The stream decides the
    order of samples; it must be equal on every process, which is checked at the start of each epoch.

    Attributes:
        notes: Notes for the plan.
        read_count: Count of what was read of it here.
        shards: Its shards, if it is read in several.
    """

    def __init__(
        self,
        read: Callable[[], Iterable[Any]],
        samples: int | None = None,
        change: Change | None = None,
        collate: Collator | None = None,
        shards: ShardedSamples | None = None,
    ) -> None:
        """Keeps the function that starts an epoch; reads nothing.

        Args:
            read: Function that returns the batches of one epoch, each (inputs, targets), (inputs, targets,
                sample weights) or inputs alone.
            samples: Number of samples per epoch. When left out, the first epoch is read ahead to count them,
                and kept if it is small.
            change: Function applied to each batch.
            collate: Function that makes a batch of a list of samples, if `read` gives samples one by one.
            shards: What `read` reads, if it is in several shards.
        """
        self._read = read
        self.shards = shards
        self._collate = collate
        self._change = change
        self._samples = samples
        self._next_epoch = 0
        self._ahead: FirstEpoch | None = None
        self.notes: list[str] = []
        self.read_count = ReadCount()

    @property
    def collates(self) -> bool:
        """Whether global batches are made of single samples so that their shapes may differ."""
        return self._collate is not None and self._collate.is_custom

    @property
    def is_read_apart(self) -> bool:
        """Whether each process reads the shards that it needs, since their lengths are known."""
        return self.shards is not None and self.shards.lengths is not None

    def __len__(self) -> int:
        """Number of samples per epoch; may read the first epoch to count them.

        Raises:
            DataError: There are none, it is a `tf.data.Dataset` that never ends, or it is padded and would
                have to be counted.
        """
        if self._samples is None and self._collate is not None and self._collate.pads:
            raise DataError(_PADDED_UNCOUNTED)
        if self._samples is None:
            batched = self._batched(_COUNTED_TOGETHER)
            read = self._read()
            if hasattr(read, "cardinality") and int(read.cardinality()) == -1:
                raise DataError(_NEVER_ENDS)
            batches = read if batched is None else batched(iter(read))
            self._ahead = FirstEpoch(batches, self.read_count)
            self._samples = self._ahead.samples
            if self._ahead.batches is None:
                self.notes.append(_READ_AGAIN)
        if self._samples < 1:
            raise DataError("the data set is empty: expected at least one sample.")
        return self._samples

    def close(self) -> None:
        """Ends processes that make its batches, if there are any."""
        if isinstance(self._read, PyDatasetReader):
            self._read.close()

    def set_up_processes(self, seed: int, timeout: float) -> None:
        """Sets the seed and the time-out in seconds of processes that make its batches, if there are any."""
        if isinstance(self._read, PyDatasetReader):
            self._read.seed, self._read.timeout = seed, timeout

    def changed(self, change: Change) -> BatchStream:
        """A stream of the same batches with `change` applied to each, after the present changes."""
        before = self._change
        both = change if before is None else lambda batch: change(before(batch))
        return BatchStream(self._read, self._samples, both, self._collate, self.shards)

    def with_collate(self, collate: Collate) -> BatchStream:
        """A stream of the same samples, of which `collate` makes global batches.

        Raises:
            DataError: The stream gives batches, or has a collate function.
        """
        collator = self._collate
        if collator is None:
            raise DataError(NO_SAMPLES.format("the stream"))
        replaced = collator.replaced(collate)
        return BatchStream(self._read, self._samples, self._change, replaced, self.shards)

    def batch_of(self, samples: list[Any]) -> InputsAndTargets:
        """The batch that its `collate` makes of samples: arrays `[samples, ...]`.

        Raises:
            DataError: The batch has not a row for each sample.
        """
        assert self._collate is not None
        batch = self._collate(samples)
        return as_batch(batch if self._change is None else self._change(batch), len(samples))

    def _batched(self, size: int) -> Batched | None:
        """Function that makes batches of `size` samples, if the stream yields samples; else None."""
        collate = self._collate
        return None if collate is None else lambda samples: batches_of(samples, size, collate)

    def epoch(
        self,
        number: int,
        stream_state: StreamState | None = None,
        *,
        batch_size: int = 1,
        state_seconds: float | None = None,
    ) -> StreamEpoch:
        """The batches of one epoch.

        A stream that shuffles itself does so in each reading: earlier epochs that were not read yet, as
        where a run resumes, are read and discarded first.

        Args:
            number: Index of the epoch, from 0.
            stream_state: State in this epoch or before it, for streams that can return to one.
            batch_size: Samples per batch, if the stream yields samples.
            state_seconds: Seconds between two states that are kept while reading; None to keep none.
        """
        ahead, self._ahead = self._ahead, None
        if ahead is not None and ahead.batches is not None:
            self._next_epoch = 1
            if number == 0:
                batches = ahead.batches
                return StreamEpoch(
                    lambda: batches,
                    0,
                    None,
                    state_seconds=None,
                    change=self._change,
                    count=ReadCount(),  # they were counted before
                )
        if stream_state is not None:
            reading = self._open_epoch(stream_state.epoch, stream_state, batch_size, state_seconds)
            if reading.is_at_saved_state:
                self._next_epoch = stream_state.epoch + 1
                if stream_state.epoch == number:
                    return reading
                _discard(reading)
        while self._next_epoch < number:
            batches_before = self._read()
            batched = self._batched(batch_size)
            for batch in batches_before if batched is None else batched(iter(batches_before)):
                self.read_count.add(batch)
            self._next_epoch += 1
        self._next_epoch = number + 1
        return self._open_epoch(number, None, batch_size, state_seconds)

    def repeated(
        self,
        stream_state: StreamState | None = None,
        *,
        batch_size: int = 1,
        state_seconds: float | None = None,
    ) -> StreamEpoch:
        """The batches of the stream, which is read again where it ends: all as one epoch without an end.

        Args:
            stream_state: State to continue from, for streams that can return to one.
            batch_size: Samples per batch, if the stream yields samples.
            state_seconds: Seconds between two states that are kept while reading; None to keep none.
        """
        return self._open_epoch(0, stream_state, batch_size, state_seconds, is_repeated=True)

    def _open_epoch(
        self,
        epoch: int,
        stream_state: StreamState | None,
        batch_size: int,
        state_seconds: float | None,
        is_repeated: bool = False,
    ) -> StreamEpoch:
        return StreamEpoch(
            self._read,
            epoch,
            stream_state,
            state_seconds=state_seconds,
            change=self._change,
            count=self.read_count,
            batched=self._batched(batch_size),
            is_repeated=is_repeated,
        )


def _discard(batches: Iterable[Any]) -> None:
    for _ in batches:
        pass


def reader(value: Any) -> Callable[[], Iterable[Any]] | None:
    """A function that starts an epoch of `value`, if that can be iterated over again and again; else None.

    That is an iterable that is no iterator, such as a `tf.data.Dataset` or a torch `DataLoader`; a Keras
    `PyDataset`; or a function that returns an iterator.
    """
    if is_py_dataset(value):
        return PyDatasetReader(value)
    if isinstance(value, str | bytes | set | frozenset | type | Iterator):
        return None
    if callable(value) and not hasattr(value, "__iter__"):
        return partial(_function_batches, value)
    is_iterable_only = is_loader(value) or is_iterable_dataset(value)
    if hasattr(value, "__iter__") and (is_iterable_only or not hasattr(value, "__getitem__")):
        return partial(_iterable_batches, value)
    return None


def _iterable_batches(value: Any) -> Any:
    """The iterable itself."""
    return value


def is_loader(value: Any) -> bool:
    """Whether the value makes batches of a data set, as torch's `DataLoader` does."""
    return all(hasattr(value, name) for name in ("dataset", "batch_sampler", "collate_fn"))


def declared_samples(value: Any) -> int | None:
    """Number of samples per epoch that a torch `DataLoader` declares; None where it must be read for that.

    It is the length of its sampler. A custom `batch_sampler` has no such length, and a custom `collate_fn`
    may drop samples.
    """
    if not is_loader(value) or not isinstance(value.batch_size, int):
        return None
    if not getattr(value.collate_fn, "__module__", "").startswith("torch."):
        return None
    try:
        count = len(value.sampler)
    except (AttributeError, TypeError, NotImplementedError):
        return None
    return count - count % value.batch_size if value.drop_last else count


def _function_batches(function: Callable[[], Any]) -> Iterable[Any]:
    """The batches of the iterator or iterable that a function returns.

    Raises:
        DataError: It returns something else.
    """
    batches = function()
    if isinstance(batches, Iterator):
        return batches
    read = reader(batches)
    if read is None:
        raise DataError(
            f"data: the function returned {type(batches).__name__}, expected an iterator over batches;"
            " for one that returns arrays, pass what it returns."
        )
    return read()
