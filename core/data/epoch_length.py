"""Number of global batches (steps) in an epoch and in a run."""

from __future__ import annotations

from collections.abc import Sized

from isotrain.core.data import sampler
from isotrain.core.data.sources import AnySource, ShardedStream
from isotrain.core.errors import DataError

_MAX_SAMPLES = 2**36


def at_least(name: str, value: int, minimum: int) -> None:
    """Checks that a number is not below its minimum; else raises a `DataError`."""
    if value < minimum:
        raise DataError(f"{name}: expected {minimum} or more, received {value}.")


def steps_per_pass(
    source: AnySource,
    global_batch_size: int,
    replicas: int,
    drop_remainder: bool,
) -> int:
    """Global batches of one pass over the data, at least one.

    Raises:
        DataError: There is not one, or the source has no length.
    """
    length = _length(source)
    if isinstance(source, ShardedStream):
        at_least("length of the stream", length, 1)
        if global_batch_size < replicas:
            raise DataError(
                f"global_batch_size: a sharded stream needs at least one sample for each of {replicas}"
                f" replicas, received {global_batch_size}."
            )
        return length
    steps = sampler.steps_per_epoch(length, global_batch_size, drop_remainder)
    if steps < 1:
        raise DataError(
            f"the data set has {length} samples: not one global batch of {global_batch_size}, and the "
            "remainder is dropped. Lower global_batch_size or keep the remainder."
        )
    return steps


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


def _length(source: Sized) -> int:
    """Number of samples, or of local batches, within a plausible range.

    Raises:
        DataError: `len` fails, or is too large for a permutation in memory.
    """
    try:
        length = len(source)
    except (OverflowError, ValueError, TypeError) as error:
        raise DataError(f"data: len() of it fails: {type(error).__name__}: {error}.") from None
    if length > _MAX_SAMPLES:
        raise DataError(
            f"data: its length is {length:,} samples; expected at most {_MAX_SAMPLES:,}, whose permutation"
            " fits into memory. Is `__len__` right?"
        )
    return length
