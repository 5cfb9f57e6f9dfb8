"""Batches that people's own loaders give: to every process alike, in an order of their own."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

from isotrain.core.errors import DataError

_MAPPED_IN_ORDER = ("SequentialSampler", "RandomSampler", "DistributedSampler")


class BatchStream:
    """Batches of any sizes, read anew for every epoch, and re-cut to global batches.

    Every process reads the whole stream, and takes its replicas' shares. Which samples a batch has is the
    stream's affair; every process must be given the same, which is checked at the start of each epoch.
    """

    def __init__(self, read: Callable[[], Iterable[Any]], samples: int | None = None) -> None:
        """Takes what begins an epoch; reads nothing.

        Args:
            read: gives the batches of one epoch, each (inputs, targets) or inputs alone.
            samples: in an epoch. When left out, the stream is read through once to count them.
        """
        self._read = read
        self._samples = samples
        self._next_epoch = 0

    def __len__(self) -> int:
        """Samples in an epoch."""
        if self._samples is None:
            self._samples = sum(map(_rows_of, self._read()))
        if self._samples < 1:
            raise DataError("the data set is empty: expected at least one sample.")
        return self._samples

    def epoch(self, number: int) -> Iterator[Any]:
        """The batches of one epoch.

        A stream that shuffles itself does so anew in each reading: epochs before this one that were not
        read yet, as where a run resumes, are read through first.
        """
        while self._next_epoch < number:
            for _ in self._read():
                pass
            self._next_epoch += 1
        self._next_epoch = number + 1
        return iter(self._read())


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
        return value.__iter__  # type: ignore[no-any-return]
    return None


def is_loader(value: Any) -> bool:
    """Whether it makes batches of a data set, as torch's `DataLoader` does."""
    return all(hasattr(value, name) for name in ("dataset", "batch_sampler", "collate_fn"))


def loads_by_position(loader: Any) -> bool:
    """Whether a loader's batches are samples of its data set by position, in no order of a person's own."""
    sampler = type(getattr(loader, "sampler", None)).__name__
    return loader.batch_size is not None and sampler in _MAPPED_IN_ORDER


def _called(function: Callable[[], Any]) -> Iterable[Any]:
    """The batches that a function gives.

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
    """The batches of a `tf.data.Dataset` as arrays.

    Raises:
        DataError: It never ends.
    """
    if int(dataset.cardinality()) == -1:
        raise DataError("data: the tf.data.Dataset never ends; leave out repeat(), or add take(n).")
    iterator: Iterator[Any] = dataset.as_numpy_iterator()
    return iterator


def _rows_of(batch: Any) -> int:
    """The samples of a batch: the rows of the first array in it."""
    while isinstance(batch, tuple | list | dict):
        if not batch:
            raise DataError("data: a batch of the stream is empty, expected (inputs, targets).")
        batch = next(iter(batch.values())) if isinstance(batch, dict) else batch[0]
    if not getattr(batch, "shape", ()):
        raise DataError(
            f"data: the stream gave {type(batch).__name__} where arrays with one row per sample are"
            " expected. Make batches first: dataset.batch(n), or arrays of shape [n, ...]."
        )
    return int(batch.shape[0])
