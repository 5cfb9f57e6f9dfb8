"""Number of global batches (steps) in an epoch and in a run."""

from __future__ import annotations

from isotrain.core.data import sampler
from isotrain.core.data.order.samples import length_of
from isotrain.core.data.sources import ShardedStream
from isotrain.core.data.streaming.streams import BatchStream
from isotrain.core.errors import DataError


def stream_steps(
    source: BatchStream | ShardedStream,
    global_batch_size: int,
    replicas: int,
    drop_remainder: bool,
) -> int:
    """Global batches of one pass over a stream, at least one.

    Raises:
        DataError: There is not one, or the stream has no length.
    """
    length = length_of(source)
    if isinstance(source, ShardedStream):
        sampler.at_least("length of the stream", length, 1)
        if global_batch_size < replicas:
            raise DataError(
                f"global_batch_size: a sharded stream needs at least one sample for each of {replicas}"
                f" replicas, received {global_batch_size}."
            )
        return length
    return sampler.steps_per_epoch(length, global_batch_size, drop_remainder)


def total_steps(epochs: int | None, steps: int | None, per_epoch: int) -> int:
    """Global batches of a run whose length is given in epochs or in steps.

    Raises:
        DataError: Both are given, or neither.
    """
    if (epochs is None) == (steps is None):
        raise DataError(
            f"expected either epochs or steps, received epochs={epochs} and steps={steps}."
        )
    return steps if steps is not None else per_epoch * (epochs or 0)
