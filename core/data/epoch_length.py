"""How many global batches there are, in an epoch and in a run."""

from __future__ import annotations

from collections.abc import Sized

from isotrain.core.data import sampler
from isotrain.core.data.sources import AnySource, ShardedStream
from isotrain.core.errors import DataError

_MOST_SAMPLES = 2**36


def at_least(name: str, value: int, bound: int) -> None:
    """Refuses a number that is too small.

    Raises:
        DataError: It is below the bound.
    """
    if value < bound:
        raise DataError(f"{name}: expected {bound} or more, got {value}.")


def epoch_steps(
    source: AnySource,
    global_batch_size: int,
    replicas: int,
    drop_remainder: bool,
) -> int:
    """Global batches per epoch, at least one.

    Raises:
        DataError: There is not one, or the source does not tell its length.
    """
    length = _length(source)
    if isinstance(source, ShardedStream):
        at_least("length of the stream", length, 1)
        if global_batch_size < replicas:
            raise DataError(
                f"global_batch_size: a stream needs a sample for each of {replicas} replicas, "
                f"got {global_batch_size}."
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
    """Global batches of a run that is given in epochs or in steps.

    Raises:
        DataError: It is given in both or in neither.
    """
    if (epochs is None) == (steps is None):
        raise DataError(f"expected either epochs or steps, got epochs={epochs} and steps={steps}.")
    return steps if steps is not None else per_epoch * (epochs or 0)


def _length(source: Sized) -> int:
    """How many samples or local batches there are, if anybody can have so many."""
    try:
        length = len(source)
    except (OverflowError, ValueError, TypeError) as error:
        raise DataError(
            f"data: its length cannot be had: {type(error).__name__}: {error}."
        ) from None
    if length > _MOST_SAMPLES:
        raise DataError(
            f"data: it says that it has {length:,} samples; expected at most {_MOST_SAMPLES:,}, whose order"
            " fits into memory. Is `__len__` right?"
        )
    return length
