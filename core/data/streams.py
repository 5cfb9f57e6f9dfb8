"""Batches that people's own loaders give: to every process alike, in an order of their own."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import numpy as np

from isotrain.core.data.arrays import as_array, as_inputs_and_targets
from isotrain.core.data.pytree import leaves, map_tree
from isotrain.core.data.stream_epoch import Change, StreamEpoch, rows_of
from isotrain.core.data.stream_state import StreamState
from isotrain.core.errors import DataError

MOST_BYTES = 64 * 1024**2
"""Of an epoch that is kept."""
SILENT_SECONDS = 10.0
"""How long an epoch is read before a person is told: nobody else knows whether it ends."""
_STILL_COUNTING = (
    "data: the stream is still being read through to count its samples, {} until now. One that never ends"
    " must be given an end, as by itertools.islice(batches, number). Of one that is large,"
    " isotrain.sources.stream(batches, samples=N) says how many an epoch has, and nothing is read for that."
)


class FirstEpoch:
    """What was read: a stream that shuffles itself, or draws random numbers, gives another epoch next time.

    Attributes:
        samples: In it.
        batches: Copies of its batches, as streams may fill the same arrays again; None of a large one.
    """

    def __init__(self, batches: Iterable[Any]) -> None:
        """Reads it through."""
        self.samples = 0
        self.batches: list[Any] | None = []
        room = MOST_BYTES
        silent_until = time.monotonic() + SILENT_SECONDS
        for batch in batches:
            self.samples += rows_of(batch)
            if time.monotonic() > silent_until:
                silent_until = float("inf")
                warnings.warn(_STILL_COUNTING.format(self.samples), stacklevel=2)
            if self.batches is not None:
                copy, size = _copied(batch)
                room -= size
                if copy is None or room < 0:
                    self.batches = None
                else:
                    self.batches.append(copy)


def _copied(batch: Any) -> tuple[Any, int]:
    """A batch of arrays of its own, and their bytes; None where it cannot be made arrays."""
    try:
        inputs, targets = as_inputs_and_targets(batch, "a batch of the stream")
        copy = map_tree(_array, (inputs, targets))
    except DataError:
        return None, 0
    return copy, sum(array.nbytes for _, array in leaves(copy, "") if array is not None)


def _array(leaf: Any) -> Any:
    return None if leaf is None else np.copy(as_array(leaf))


_READ_AGAIN = (
    "data: the stream was read through to count its samples, and is too large to be kept (64 MiB): training"
    " begins with its second epoch, which is another one where it shuffles itself or draws random numbers."
    " isotrain.sources.stream(batches, samples=N) says how many an epoch has, and nothing is read for that"
)
_MAPPED_IN_ORDER = ("SequentialSampler", "RandomSampler", "DistributedSampler")


class BatchStream:
    """Batches of any sizes, read anew for every epoch, and re-cut to global batches.

    Every process reads the whole stream, and takes its replicas' shares. Which samples a batch has is the
    stream's affair; every process must be given the same, which is checked at the start of each epoch.

    Attributes:
        notes: What became of it that a person should know.
    """

    def __init__(
        self,
        read: Callable[[], Iterable[Any]],
        samples: int | None = None,
        change: Change | None = None,
    ) -> None:
        """Takes what begins an epoch; reads nothing.

        Args:
            read: gives what has the batches of one epoch, each (inputs, targets), (inputs, targets, sample
                weights) or inputs alone.
            samples: in an epoch. When left out, the first epoch is read ahead to count them: it is kept for
                its turn, as the stream may give another one then, if it is small.
            change: what is made of each batch.
        """
        self._read = read
        self._change = change
        self._samples = samples
        self._next_epoch = 0
        self._ahead: FirstEpoch | None = None
        self.notes: list[str] = []

    def __len__(self) -> int:
        """Samples in an epoch."""
        if self._samples is None:
            self._ahead = FirstEpoch(self._read())
            self._samples = self._ahead.samples
            if self._ahead.batches is None:
                self.notes.append(_READ_AGAIN)
        if self._samples < 1:
            raise DataError("the data set is empty: expected at least one sample.")
        return self._samples

    def changed(self, change: Change) -> BatchStream:
        """The same batches, of each of which, as it is here, something else is made."""
        before = self._change
        both = change if before is None else lambda batch: change(before(batch))
        return BatchStream(self._read, self._samples, both)

    def epoch(
        self, number: int, mark: StreamState | None = None, *, mark_seconds: float | None = None
    ) -> StreamEpoch:
        """The batches of one epoch.

        A stream that shuffles itself does so anew in each reading: epochs before this one that were not
        read yet, as where a run resumes, are read through first.

        Args:
            number: from 0.
            mark: a place in this epoch or before it, for streams that can be taken there.
            mark_seconds: between two such places that the reading notes; None: it notes none.
        """
        ahead, self._ahead = self._ahead, None
        if ahead is not None and ahead.batches is not None:
            self._next_epoch = 1
            if number == 0:
                return StreamEpoch(ahead.batches, 0, None, mark_seconds=None, change=self._change)
        if mark is not None:
            reading = self._reading(mark.epoch, mark, mark_seconds)
            if reading.is_at_mark:
                self._next_epoch = mark.epoch + 1
                if mark.epoch == number:
                    return reading
                _read_through(reading)
        while self._next_epoch < number:
            _read_through(self._read())
            self._next_epoch += 1
        self._next_epoch = number + 1
        return self._reading(number, None, mark_seconds)

    def _reading(
        self, epoch: int, mark: StreamState | None, mark_seconds: float | None
    ) -> StreamEpoch:
        return StreamEpoch(
            self._read(), epoch, mark, mark_seconds=mark_seconds, change=self._change
        )


def _read_through(batches: Iterable[Any]) -> None:
    for _ in batches:
        pass


def reader(value: Any) -> Callable[[], Iterable[Any]] | None:
    """What begins an epoch of `value`, if it is something that gives batches again and again.

    That is an iterable that is no iterator, such as a `tf.data.Dataset` or a loader of torch; a Keras
    `PyDataset`; or a function that returns an iterator.
    """
    if hasattr(value, "as_numpy_iterator"):
        return partial(_finite, value)
    if _is_keras_dataset(value):
        return partial(_indexed, value)
    if isinstance(value, str | bytes | set | frozenset | type | Iterator):
        return None
    if callable(value) and not hasattr(value, "__iter__"):
        return partial(_called, value)
    if hasattr(value, "__iter__") and (is_loader(value) or not hasattr(value, "__getitem__")):
        return partial(_itself, value)
    return None


def _itself(value: Any) -> Any:
    """What gives batches whenever it is iterated over."""
    return value


def is_loader(value: Any) -> bool:
    """Whether it makes batches of a data set, as torch's `DataLoader` does."""
    return all(hasattr(value, name) for name in ("dataset", "batch_sampler", "collate_fn"))


def declared_samples(value: Any) -> int | None:
    """The samples of an epoch, where a loader of torch tells them; None where it must be read for that.

    Its sampler gives the position of each. A `batch_sampler` of a person's own says nothing of that, and a
    `collate_fn` may leave some out.
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


def loads_by_position(loader: Any) -> bool:
    """Whether a loader's batches are samples of its data set by position, in no order of a person's own."""
    sampler = getattr(loader, "sampler", None)
    if loader.batch_size is None or type(sampler).__name__ not in _MAPPED_IN_ORDER:
        return False
    return type(sampler).__name__ != "RandomSampler" or _gives_each_once(sampler, loader.dataset)


def _gives_each_once(sampler: Any, samples: Any) -> bool:
    """Whether a random sampler of torch gives every sample, and none of them twice."""
    return not sampler.replacement and sampler.num_samples == len(samples)


def _called(function: Callable[[], Any]) -> Iterable[Any]:
    """What has the batches that a function gives.

    Raises:
        DataError: It returns something else.
    """
    given = function()
    if isinstance(given, Iterator):
        return given
    read = reader(given)
    if read is None:
        raise DataError(
            f"data: the function returned {type(given).__name__}, expected an iterator over batches;"
            " for one that returns arrays, pass what it returns."
        )
    return read()


def _is_keras_dataset(value: Any) -> bool:
    return any(kind.__name__ == "PyDataset" for kind in type(value).__mro__)


def _indexed(dataset: Any) -> Iterator[Any]:
    """The batches of a Keras `PyDataset`, and the end of its epoch."""
    for position in range(len(dataset)):
        yield dataset[position]
    dataset.on_epoch_end()


def _finite(dataset: Any) -> Iterator[Any]:
    """The batches of a `tf.data.Dataset`, as its own tensors.

    Raises:
        DataError: It never ends.
    """
    if int(dataset.cardinality()) == -1:
        raise DataError("data: the tf.data.Dataset never ends; leave out repeat(), or add take(n).")
    return iter(dataset)
