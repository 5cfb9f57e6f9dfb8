"""Reading of the global batches of a stream, from any step of a run on."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from isotrain.core.data import sampler
from isotrain.core.data.arrays import InputsAndTargets
from isotrain.core.data.streaming import rebatch
from isotrain.core.data.streaming.scheduled_shards import ScheduledReading
from isotrain.core.data.streaming.stream_state import StreamState
from isotrain.core.data.streaming.streams import BatchStream


@dataclass(frozen=True, slots=True)
class GlobalBatch:
    """A global batch of a stream, or some rows of it.

    Attributes:
        parts: Inputs and targets, arrays with the rows from `first_row` on.
        size: Number of samples in the global batch.
        fingerprint: Checksum of the samples; only in the first batch that is read of each epoch.
        stream_state: A stream state from which reading can continue, if the stream has a state.
        first_row: First row of `parts` in the global batch.
    """

    parts: InputsAndTargets
    size: int
    fingerprint: int | None
    stream_state: StreamState | None
    first_row: int = 0


@dataclass(frozen=True)
class StreamCut:
    """Cut of a stream to global batches and epochs.

    Attributes:
        global_batch_size: Samples per global batch.
        steps_per_epoch: Global batches per epoch.
        total_steps: Global batches of the run.
        is_repeated: Whether an epoch is a number of steps: then the stream may be endless, and is read again
            where it ends, without a smaller batch there. Else an epoch is one pass over the stream.
        state_seconds: Seconds between two states of the stream; None for none.
    """

    global_batch_size: int
    steps_per_epoch: int
    total_steps: int
    is_repeated: bool
    state_seconds: float | None

    def samples_of(self, step: int, samples: int) -> tuple[int, int]:
        """First sample of a global batch and the one after its last, over all epochs of so many samples."""
        epoch, index = (0, step) if self.is_repeated else divmod(step, self.steps_per_epoch)
        start = epoch * samples + index * self.global_batch_size
        stop = start + self.global_batch_size
        return start, stop if self.is_repeated else min(stop, (epoch + 1) * samples)


@dataclass(frozen=True)
class RowsOf:
    """A function from the size of a global batch to the rows that hold those of some replicas.

    A replica without rows gets the first one, as a placeholder.

    Attributes:
        replicas: Number of replicas in the run.
        chosen: Indices of the replicas.
        parts: Parts of a global batch, of which each replica has whole ones; None: rows are shared equally.
    """

    replicas: int
    chosen: Sequence[int]
    parts: int | None = None

    def __call__(self, size: int) -> slice:
        """The rows."""
        bounds = [
            sampler.slice_bounds(size, self.replicas, each, self.parts) for each in self.chosen
        ]
        rows = [(start, stop) if start < stop else (0, 1) for start, stop in bounds]
        return slice(min(start for start, _ in rows), max(stop for _, stop in rows))


def global_batches(
    source: BatchStream,
    cut: StreamCut,
    step: int,
    stream_state: StreamState | None,
    rows_of: RowsOf,
    is_on_device: rebatch.IsOnDevice = rebatch.never_on_device,
) -> Iterator[GlobalBatch]:
    """The global batches of a stream from a step of the run to its end, or at least some rows of them.

    Args:
        source: The stream.
        cut: Sizes of batches and epochs.
        step: Index of the step.
        stream_state: State of the stream at that step or earlier; None to read from its start.
        rows_of: The rows that are needed; others are left out if the lengths of its shards are known.
        is_on_device: Whether a leaf is already on the device, and passed on as it is.
    """
    if source.is_read_apart:
        assert source.shards is not None
        reading = ScheduledReading(source.shards, stream_state)
        return _scheduled_batches(source, reading, cut, step, stream_state, rows_of)
    read = _repeated_batches if cut.is_repeated else _batches_of_epochs
    return read(source, cut, step, stream_state, is_on_device)


def _scheduled_batches(
    source: BatchStream,
    reading: ScheduledReading,
    cut: StreamCut,
    first_step: int,
    state: StreamState | None,
    rows_of: RowsOf,
) -> Iterator[GlobalBatch]:
    schedule, state_time = reading.schedule, -math.inf
    for step in range(first_step, cut.total_steps):
        start, stop = cut.samples_of(step, schedule.samples)
        rows = rows_of(stop - start)
        parts = source.batch_of(reading.rows(start, stop, rows, source.read_count))
        if cut.state_seconds is not None and time.monotonic() - state_time >= cut.state_seconds:
            state_time, state = time.monotonic(), reading.state(stop)
        is_first = step == first_step or step % cut.steps_per_epoch == 0
        fingerprint = schedule.checksum if is_first else None
        yield GlobalBatch(parts, stop - start, fingerprint, state, rows.start)


def _repeated_batches(
    source: BatchStream,
    cut: StreamCut,
    first_step: int,
    stream_state: StreamState | None,
    is_on_device: rebatch.IsOnDevice,
) -> Iterator[GlobalBatch]:
    size = cut.global_batch_size
    reading = source.repeated(stream_state, batch_size=size, state_seconds=cut.state_seconds)
    batches = rebatch.global_batches(
        reading,
        size,
        samples_before=reading.samples_read,
        first=first_step * size,
        is_on_device=is_on_device,
    )
    for step, (parts, _) in zip(range(first_step, cut.total_steps), batches, strict=False):
        is_first = step == first_step or step % cut.steps_per_epoch == 0
        fingerprint = rebatch.fingerprint(parts) if is_first else None
        yield GlobalBatch(parts, size, fingerprint, reading.stream_state)


def _batches_of_epochs(
    source: BatchStream,
    cut: StreamCut,
    step: int,
    stream_state: StreamState | None,
    is_on_device: rebatch.IsOnDevice,
) -> Iterator[GlobalBatch]:
    size, before = cut.global_batch_size, stream_state
    while step < cut.total_steps:
        epoch, skip = divmod(step, cut.steps_per_epoch)
        reading = source.epoch(
            epoch, stream_state, batch_size=size, state_seconds=cut.state_seconds
        )
        batches = rebatch.global_batches(
            reading,
            size,
            len(source),
            samples_before=reading.samples_read,
            first=skip * size,
            is_on_device=is_on_device,
        )
        for index, (parts, rows) in enumerate(batches, skip):
            if index == cut.steps_per_epoch or step == cut.total_steps:
                break
            fingerprint = rebatch.fingerprint(parts) if index == skip else None
            yield GlobalBatch(parts, rows, fingerprint, reading.stream_state or before)
            step += 1
        before, stream_state = reading.stream_state or before, None
