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
    """A global batch of a stream.

    Attributes:
        parts: Inputs and targets, arrays of shape [size, ...].
        size: Number of samples.
        fingerprint: Checksum of the samples; only in the first batch that is read of each epoch.
        stream_state: A stream state from which reading can continue, if the stream has a state.
    """

    parts: InputsAndTargets
    size: int
    fingerprint: int | None
    stream_state: StreamState | None


@dataclass(frozen=True)
class StreamReader:
    """Reader of a stream's global batches.

    Attributes:
        source: The stream.
        global_batch_size: Samples per global batch.
        steps_per_epoch: Global batches per epoch.
        total_steps: Global batches of the run.
        is_repeated: Whether an epoch is a number of steps: then the stream may be endless, and is read again
            where it ends, without a smaller batch there. Else an epoch is one pass over the stream.
        state_seconds: Seconds between two states of the stream; None for none.
        is_on_device: Whether a leaf is already on the device, and passed on as it is.
    """

    source: BatchStream
    global_batch_size: int
    steps_per_epoch: int
    total_steps: int
    is_repeated: bool
    state_seconds: float | None
    is_on_device: rebatch.IsOnDevice

    def read(self, step: int, stream_state: StreamState | None) -> Iterator[GlobalBatch]:
        """The global batches from a step of the run to its end.

        Args:
            step: Index of the step.
            stream_state: State of the stream at that step or earlier; None to read from its start.
        """
        if self.is_repeated:
            return self._read_repeatedly(step, stream_state)
        return self._read_epochs(step, stream_state)

    def _read_repeatedly(
        self, first_step: int, stream_state: StreamState | None
    ) -> Iterator[GlobalBatch]:
        size = self.global_batch_size
        reading = self.source.repeated(
            stream_state, batch_size=size, state_seconds=self.state_seconds
        )
        batches = rebatch.global_batches(
            reading,
            size,
            samples_before=reading.samples_read,
            first=first_step * size,
            is_on_device=self.is_on_device,
        )
        for step, (parts, _) in zip(range(first_step, self.total_steps), batches, strict=False):
            is_first = step == first_step or step % self.steps_per_epoch == 0
            fingerprint = rebatch.fingerprint(parts) if is_first else None
            yield GlobalBatch(parts, size, fingerprint, reading.stream_state)

    def _read_epochs(self, step: int, stream_state: StreamState | None) -> Iterator[GlobalBatch]:
        before = stream_state
        while step < self.total_steps:
            epoch, skip = divmod(step, self.steps_per_epoch)
            reading = self.source.epoch(
                epoch,
                stream_state,
                batch_size=self.global_batch_size,
                state_seconds=self.state_seconds,
            )
            batches = rebatch.global_batches(
                reading,
                self.global_batch_size,
                len(self.source),
                samples_before=reading.samples_read,
                first=skip * self.global_batch_size,
                is_on_device=self.is_on_device,
            )
            for index, (parts, size) in enumerate(batches, skip):
                if index == self.steps_per_epoch or step == self.total_steps:
                    break
                fingerprint = rebatch.fingerprint(parts) if index == skip else None
                yield GlobalBatch(parts, size, fingerprint, reading.stream_state or before)
                step += 1
            before, stream_state = reading.stream_state or before, None
