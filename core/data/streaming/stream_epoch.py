"""Reading of one epoch of a stream, with stream states from which a later run can continue."""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from isotrain.core.data.collate import as_mapping, is_structure
from isotrain.core.data.pytree import leaves
from isotrain.core.data.streaming.rebatch import next_sample
from isotrain.core.data.streaming.stream_state import StreamState, opened
from isotrain.core.errors import DataError

Change = Callable[[Any], Any]
Batched = Callable[[Iterator[Any]], Iterator[Any]]
"""A function from an iterator over samples to one over batches."""


@dataclass
class ReadCount:
    """Count of what was read of a stream.

    Attributes:
        samples: Number of samples.
        bytes: Bytes of their arrays.
    """

    samples: int = 0
    bytes: int = 0

    def add(self, batch: Any) -> None:
        """Counts a batch."""
        self.samples += rows_of(batch)
        self.bytes += sum(_nbytes(leaf) for _, leaf in leaves(batch, "", lists=True))

    def add_samples(self, samples: list[Any]) -> None:
        """Counts samples of which no batch was made."""
        self.samples += len(samples)
        self.bytes += sum(_nbytes(leaf) for _, leaf in leaves(samples, "", lists=True))


def _nbytes(leaf: Any) -> int:
    """Bytes of an array, a tensor, a number, a text or the parts of a dataclass; 0 for anything else."""
    if is_structure(leaf):
        return sum(_nbytes(part) for _, part in leaves(dict(as_mapping(leaf, "")), "", lists=True))
    if isinstance(leaf, int | float | str | bytes):
        return len(leaf) if isinstance(leaf, str | bytes) else 8
    if hasattr(leaf, "nbytes"):
        return int(leaf.nbytes)
    size = getattr(getattr(leaf, "dtype", None), "size", 0)  # of a tensor of TensorFlow
    return math.prod(leaf.shape) * size if isinstance(size, int) and size else 0


_END = object()
"""Value after the last batch of a reading."""


class StreamEpoch:
    """Iterator over the batches of one epoch of a stream, from its start or from a saved state.

    A repeated stream is read again where it ends: all its readings are one epoch without an end.

    Attributes:
        is_at_saved_state: Whether the saved state could be loaded; else reading starts at the epoch's start.
        samples_read: Number of samples of the epoch in the batches so far.
        stream_state: Latest state to which the stream can return; None before there is one.
    """

    def __init__(
        self,
        read: Callable[[], Iterable[Any]],
        epoch: int,
        stream_state: StreamState | None,
        *,
        state_seconds: float | None,
        change: Change | None,
        count: ReadCount,
        batched: Batched | None = None,
        is_repeated: bool = False,
    ) -> None:
        """Starts an epoch, or continues one from a saved state.

        Args:
            read: Function that starts a reading of the stream.
            epoch: Index of the epoch, from 0.
            stream_state: State in this epoch to continue from; None for its start.
            state_seconds: Seconds between two states that are kept, which may be large; None to keep none.
            change: Function applied to each batch.
            count: Count to which what is read is added.
            batched: Function from samples to batches, for a stream that yields samples; it reads those of a
                batch when the batch is requested.
            is_repeated: Whether to read the stream again where it ends.
        """
        self._read = read
        self._batched = batched
        self._epoch = epoch
        self._is_repeated = is_repeated
        self._open(stream_state)
        self.is_at_saved_state = stream_state is not None and self._handler is not None
        self.stream_state = stream_state if self.is_at_saved_state else None
        self.samples_read = 0 if self.stream_state is None else self.stream_state.samples_read
        self._expected_sample = None if self.stream_state is None else self.stream_state.next_sample
        self._state_seconds = state_seconds
        self._state_time: float | None = None
        self._change = change
        self._count = count

    def _open(self, stream_state: StreamState | None) -> None:
        """Starts a reading, from the saved state if there is one."""
        self._source = self._read()
        state = None if stream_state is None else stream_state.state
        items, self._handler = opened(self._source, state)
        self._batches = items if self._batched is None else self._batched(items)

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        """The next batch.

        States are taken between two batches of an epoch, never at its ends: there, some streams mean the end
        of the epoch and others the start of the next one.
        """
        state = self._state()
        batch = next(self._batches, _END)
        if batch is _END:
            state, batch = None, self._first_of_next_reading()
        if self._expected_sample is not None:
            self._require_expected(batch)
        if state is not None:
            self.stream_state = StreamState(
                self._epoch, self.samples_read, state, next_sample(batch)
            )
        self.samples_read += rows_of(batch)
        self._count.add(batch)
        return batch if self._change is None else self._change(batch)

    def _first_of_next_reading(self) -> Any:
        """The first batch of the next reading of a repeated stream; ends the iteration of others.

        Raises:
            DataError: The next reading has no batch.
        """
        if not self._is_repeated:
            raise StopIteration
        self._open(None)
        batch = next(self._batches, _END)
        if batch is _END:
            raise DataError(
                "data: the stream gave no batch when it was read again. Give one that starts anew in every"
                " reading, such as a function that returns its iterator."
            )
        return batch

    def _state(self) -> Any:
        """The stream's state as JSON values, if one is due; after a warning, none is requested again."""
        if self._handler is None or not self._is_state_due():
            return None
        self._state_time = time.monotonic()
        try:
            return self._handler.state()
        except DataError as error:
            self._handler = None
            warnings.warn(str(error), stacklevel=2)
            return None

    def _is_state_due(self) -> bool:
        if (
            self._state_seconds is None
            or not self.samples_read
            or self._expected_sample is not None
        ):
            return False  # right after loading, the state is the saved one
        at = self._state_time
        return at is None or time.monotonic() - at >= self._state_seconds

    def _require_expected(self, batch: Any) -> None:
        """Checks that the stream continues with the sample that the saved state names.

        Raises:
            DataError: It continues with another sample.
        """
        if next_sample(batch) != self._expected_sample:
            raise DataError(
                f"data: {type(self._source).__name__} did not return to its saved state: its next sample is"
                " not the one that came next when the checkpoint was saved. Give a function that reads it"
                " (def batches(): yield from loader): a run that resumes then reads the epoch again up to"
                " that sample."
            )
        self._expected_sample = None


def rows_of(batch: Any) -> int:
    """The number of samples in a batch: the rows of its first array, of shape [n, ...].

    Raises:
        DataError: It is empty, or its first leaf is no array with rows.
    """
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
