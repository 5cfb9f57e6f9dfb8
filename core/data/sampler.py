"""Which samples make up each global batch, and which of them each replica gets.

Everything here is a pure function, called by every process and local to it: no framework, replica
count, process count or resume point enters the order of the samples.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from isotrain.core.errors import DataError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Indices = NDArray[np.int64]


def permutation(seed: int, epoch: int, length: int, shuffle: bool) -> Indices:
    """The order in which epoch `epoch` visits the samples.

    Args:
        seed: the spec's seed, 0 or more.
        epoch: number of the epoch, from 0.
        length: samples in the data set.
        shuffle: False gives 0, 1, 2, ... in every epoch.

    Returns:
        int64 array of shape [length] that holds each of 0 .. length - 1 once.
    """
    import numpy as np

    if not shuffle:
        return np.arange(length, dtype=np.int64)
    if seed < 0:
        raise DataError(f"seed: expected 0 or more, got {seed}.")
    sequence = np.random.SeedSequence(seed, spawn_key=(epoch,))
    drawn = np.random.Generator(np.random.PCG64(sequence)).permutation(length)
    return drawn.astype(np.int64, copy=False)


def steps_per_epoch(length: int, global_batch_size: int, drop_remainder: bool) -> int:
    """How many global batches one epoch has; a last partial one counts unless it is dropped."""
    full, rest = divmod(length, global_batch_size)
    return full if drop_remainder or rest == 0 else full + 1


def global_batch_indices(order: Indices, t: int, global_batch_size: int) -> Indices:
    """The samples of global batch `t`: a view of `order`, shorter only where `order` ends."""
    return order[t * global_batch_size : (t + 1) * global_batch_size]


def slice_bounds(size: int, replicas: int, replica: int) -> tuple[int, int]:
    """The contiguous part of `size` samples that is `replica`'s share.

    Sizes differ by at most one and the larger ones come first, so some shares are empty when there
    are fewer samples than replicas.

    Returns:
        start and stop, positions within the global batch.
    """
    share, larger = divmod(size, replicas)
    start = replica * share + min(replica, larger)
    return start, start + share + (replica < larger)


def slice_sizes(size: int, replicas: int, gradient_accumulation_steps: int) -> set[int]:
    """How many samples the slices of a global batch have."""
    return {
        part
        for share in _sizes(size, replicas)
        for part in _sizes(share, gradient_accumulation_steps)
    }


def _sizes(size: int, parts: int) -> set[int]:
    """Of the parts that `slice_bounds` gives."""
    least, larger = divmod(size, parts)
    return {least, least + bool(larger)}
