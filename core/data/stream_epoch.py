"""One epoch of a stream as it is read, and the places to which it can be taken back."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from isotrain.core.data.rebatch import next_sample
from isotrain.core.data.stream_state import StreamState, StreamStateHandler
from isotrain.core.errors import DataError

Change = Callable[[Any], Any]


class StreamEpoch:
    """The batches of one epoch of a stream, from its start or from a mark on.

    Attributes:
        is_at_mark: Whether the stream could be taken to the mark; else it is at its start.
        given: Samples of the epoch in the batches so far.
        mark: The last place to which the stream can be taken back; None before there is one.
    """

    def __init__(
        self,
        source: Iterable[Any],
        epoch: int,
        mark: StreamState | None,
        *,
        mark_seconds: float | None,
        change: Change | None,
    ) -> None:
        """Begins an epoch, or goes on in one.

        Args:
            source: Gives its batches.
            epoch: Its number.
            mark: A place in it; None: its start.
            mark_seconds: Between two that are noted, for what a stream says may be large; None: none is.
            change: What is made of each batch.
        """
        self._source = source
        self._epoch = epoch
        self._keeper = StreamStateHandler.of(source)
        self._load(mark)
        self._batches = iter(source)
        if self._keeper is None:
            self._keeper = StreamStateHandler.of(self._batches)
            self._load(mark)
        self.is_at_mark = mark is not None and self._keeper is not None
        self.mark = mark if self.is_at_mark else None
        self.given = 0 if self.mark is None else self.mark.given
        self._due = None if self.mark is None else self.mark.next_sample
        self._mark_seconds = mark_seconds
        self._marked_at: float | None = None
        self._change = change

    def _load(self, mark: StreamState | None) -> None:
        if mark is not None and self._keeper is not None:
            self._keeper.load(mark.state)

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        """The next batch.

        A mark is a place between two batches: what a stream says at the ends of its epochs, some take for
        the end of one and some for the start of the next.
        """
        state = self._state()
        batch = next(self._batches)
        if self._due is not None:
            self._require_due(batch)
        if state is not None:
            self.mark = StreamState(self._epoch, self.given, state, next_sample(batch))
        self.given += rows_of(batch)
        return batch if self._change is None else self._change(batch)

    def _state(self) -> Any:
        """Where the stream is, if that is to be noted; what no checkpoint can hold is not asked for again."""
        if self._keeper is None or not self._is_mark_due():
            return None
        self._marked_at = time.monotonic()
        try:
            return self._keeper.state()
        except DataError as error:
            self._keeper = None
            warnings.warn(str(error), stacklevel=2)
            return None

    def _is_mark_due(self) -> bool:
        if self._mark_seconds is None or not self.given or self._due is not None:
            return False  # at the mark itself it is known
        at = self._marked_at
        return at is None or time.monotonic() - at >= self._mark_seconds

    def _require_due(self, batch: Any) -> None:
        """Makes sure that the stream is at the mark.

        Raises:
            DataError: It gives another sample than then.
        """
        if next_sample(batch) != self._due:
            raise DataError(
                f"data: {type(self._source).__name__} has not gone to where its own state says that it was:"
                " the sample that comes next is another than when the checkpoint was saved. Give a function"
                " that reads it (def batches(): yield from loader): a run that resumes then reads on to"
                " where it was."
            )
        self._due = None


def rows_of(batch: Any) -> int:
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
