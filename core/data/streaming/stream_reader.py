"""Reading of the global batches of a stream, from any step of a run on."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from isotrain.core.data.arrays import InputsAndTargets
from isotrain.core.data.streaming import rebatch
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


def global_batches(
    source: BatchStream,
    cut: StreamCut,
    step: int,
    stream_state: StreamState | None,
    is_on_device: rebatch.IsOnDevice = rebatch.never_on_device,
) -> Iterator[GlobalBatch]:
    """The global batches of a stream from a step of the run to its end.

    Args:
        source: The stream.
        cut: Sizes of batches and epochs.
        step: Index of the step.
        stream_state: State of the stream at that step or earlier; None to read from its start.
        is_on_device: Whether a leaf is already on the device, and passed on as it is.
    """
    read = _repeated_batches if cut.is_repeated else _batches_of_epochs
    return read(source, cut, step, stream_state, is_on_device)


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
