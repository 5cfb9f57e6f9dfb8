"""The distributed sampler: the samples of each global batch, and the part of each replica.

All functions are pure and local. The order of samples depends on seed and epoch alone: not on framework,
number of replicas or processes, or the step at which a run resumes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from isotrain.core.errors import DataError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Indices = NDArray[np.int64]


def permutation(seed: int, epoch: int, length: int, shuffle: bool) -> Indices:
    """The order of the samples in an epoch: a Fisher-Yates shuffle by PCG64, seeded with (seed, epoch).

    Args:
        seed: The spec's seed, 0 or more.
        epoch: Index of the epoch, from 0.
        length: Number of samples in the data set.
        shuffle: Whether to shuffle; else the order is 0, 1, 2, ... in every epoch.

    Returns:
        int64 [length], each of 0 .. length - 1 once.

    Raises:
        DataError: The seed is negative.
    """
    import numpy as np

    if not shuffle:
        return np.arange(length, dtype=np.int64)
    if seed < 0:
        raise DataError(f"seed: expected 0 or more, received {seed}.")
    sequence = np.random.SeedSequence(seed, spawn_key=(epoch,))
    order = np.random.Generator(np.random.PCG64(sequence)).permutation(length)
    return order.astype(np.int64, copy=False)


def steps_per_epoch(length: int, global_batch_size: int, drop_remainder: bool) -> int:
    """Number of global batches in an epoch; a last partial one counts unless it is dropped."""
    full, rest = divmod(length, global_batch_size)
    return full if drop_remainder or rest == 0 else full + 1


def global_batch_indices(order: Indices, t: int, global_batch_size: int) -> Indices:
    """Sample indices of global batch `t` of an epoch, int64 [size].

    A view of `order` (int64 [samples]); shorter than the global batch size only where `order` ends.
    """
    return order[t * global_batch_size : (t + 1) * global_batch_size]


def slice_bounds(size: int, replicas: int, replica: int) -> tuple[int, int]:
    """The contiguous part of a global batch of `size` samples that is the local batch of a replica.

    Sizes differ by at most one and the larger ones come first, so some local batches are empty when there
    are fewer samples than replicas.

    Returns:
        Start and stop, positions within the global batch.
    """
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
