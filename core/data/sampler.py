"""The distributed sampler: global batches of an epoch, and the part of each replica, as pure functions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from isotrain.core.errors import DataError
from isotrain.core.quantities import counted

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Indices = NDArray[np.int64]


def at_least(name: str, value: int, minimum: int) -> None:
    """Checks that a number is not below its minimum; else raises a `DataError`."""
    if value < minimum:
        raise DataError(f"{name}: expected {minimum} or more, received {value}.")


def steps_per_epoch(length: int, global_batch_size: int, drop_remainder: bool) -> int:
    """Number of global batches in an epoch, at least one; a last partial one counts unless it is dropped.

    Raises:
        DataError: There is not one.
    """
    full, rest = divmod(length, global_batch_size)
    steps = full if drop_remainder or rest == 0 else full + 1
    if steps < 1:
        raise DataError(
            f"the data set has {counted(length, 'sample')}: not one global batch of {global_batch_size}, and"
            " the remainder is dropped. Lower global_batch_size or keep the remainder."
        )
    return steps


def equal_part_counts(parts: int, replicas: int) -> tuple[int, ...]:
    """Number of parts of each replica, where these are dealt equally."""
    bounds = [slice_bounds(parts, replicas, replica) for replica in range(replicas)]
    return tuple(end - first for first, end in bounds)


def part_bounds(part_counts: Sequence[int], replica: int) -> tuple[int, int]:
    """First part of a replica and the one after its last, by the number of parts of each replica."""
    first = sum(part_counts[:replica])
    return first, first + part_counts[replica]


def slice_bounds(
    size: int, replicas: int, replica: int, parts: int | Sequence[int] | None = None
) -> tuple[int, int]:
    """The contiguous part of a global batch of `size` samples that is the local batch of a replica.

    Sizes differ by at most one and the larger ones come first, so some local batches are empty when there
    are fewer samples than replicas.

    Args:
        size: Number of samples.
        replicas: Number of replicas.
        replica: Index of the replica.
        parts: Parts, of which each replica gets whole ones: their number, dealt equally, or the number of
            each replica; None: samples are shared equally.

    Returns:
        Start and stop, positions within the global batch.
    """
    if parts is not None:
        counts = equal_part_counts(parts, replicas) if isinstance(parts, int) else parts
        first, end = part_bounds(counts, replica)
        total = sum(counts)
        return slice_bounds(size, total, first)[0], slice_bounds(size, total, end - 1)[1]
    smaller, remainder = divmod(size, replicas)
    start = replica * smaller + min(replica, remainder)
    return start, start + smaller + (replica < remainder)


def slice_sizes(size: int, replicas: int, gradient_accumulation_steps: int) -> set[int]:
    """The possible numbers of samples in a slice of a global batch of `size` samples."""
    return {
        slice_size
        for local_size in _part_sizes(size, replicas)
        for slice_size in _part_sizes(local_size, gradient_accumulation_steps)
    }


def _part_sizes(size: int, parts: int) -> set[int]:
    """The sizes of the parts by `slice_bounds`: one, or two that differ by one."""
    smaller, remainder = divmod(size, parts)
    return {smaller, smaller + bool(remainder)}
