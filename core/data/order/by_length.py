"""Global batches of samples of similar length, with a bound on samples or on tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from isotrain.core.data.order.order import BatchAt, Order
from isotrain.core.data.order.permutation import random_of
from isotrain.core.data.order.samples import Column, Samples, lengths_of
from isotrain.core.errors import DataError
from isotrain.core.quantities import counted

if TYPE_CHECKING:
    from isotrain.core.data.sampler import Indices

_BUCKETS = 8


def by_length(
    data: Samples,
    *,
    lengths: Column,
    buckets: Sequence[int] | None = None,
    tokens: int | None = None,
) -> Order:
    """Global batches of samples of similar length, in a new order in every epoch.

    Samples are grouped into buckets by length, shuffled within them, laid in a row from the longest to the
    shortest, and cut. The cuts are the same in every epoch; a global batch that begins in one bucket may end
    in the next shorter one. Then the global batches are shuffled, but for the last.

    Args:
        data: The samples.
        lengths: Length of each sample, such as its number of tokens; or entries that have a `len`.
        buckets: Largest lengths of the buckets, ascending; None for eight of equally many samples.
        tokens: Most tokens in a global batch when all samples are padded to the largest length of their
            bucket; then `global_batch_size` is the most samples, and numbers above 8 are multiples of 8, for
            fewer different shapes. None for `global_batch_size` samples in each.

    Raises:
        DataError: Samples are longer than the last bucket or the tokens of a global batch.
    """
    sizes = lengths_of(lengths, data, "order.lengths")
    widths = _widths(sizes, buckets)
    if sizes.max() > widths[-1]:
        raise DataError(
            f"order.buckets: the last is {widths[-1]}, and the longest sample has {sizes.max()}; expected a"
            " last bucket for that."
        )
    if tokens is not None and tokens < widths[-1]:
        raise DataError(
            f"order.tokens: {tokens} in a global batch; expected at least {widths[-1]}, the length of the"
            " last bucket."
        )
    bucket_of = np.searchsorted(widths, sizes)
    members = [np.flatnonzero(bucket_of == number) for number in reversed(range(len(widths)))]
    most = [
        data.global_batch_size
        if tokens is None
        else min(data.global_batch_size, _rounded(tokens // max(width, 1)))
        for width in reversed(widths.tolist())
    ]
    starts, is_full = _cuts([len(each) for each in members], most)
    if data.drop_remainder and not is_full:
        starts = starts[:-1]
    steps = len(starts) - 1
    if steps < 1:
        raise DataError(
            f"the data set has {counted(data.length, 'sample')}: not one global batch of {most[-1]}, and the"
            " remainder is dropped. Lower global_batch_size or keep the remainder."
        )
    fixed = not is_full and not data.drop_remainder

    def epoch(number: int) -> BatchAt:
        random = random_of(data.seed, number, 1)
        positions = np.concatenate([random.permutation(each) for each in members])
        batches = random.permutation(steps - fixed)
        return lambda index: _batch(
            positions, starts, batches[index] if index < len(batches) else index
        )

    batch_sizes = frozenset(np.unique(np.diff(starts)).tolist())
    return Order(data.length, steps, batch_sizes, epoch)


def _batch(positions: Indices, starts: Indices, number: int) -> Indices:
    return positions[starts[number] : starts[number + 1]]


def _widths(sizes: Indices, buckets: Sequence[int] | None) -> Indices:
    """The largest lengths of the buckets, ascending, int64 [buckets]."""
    if buckets is not None:
        return np.array(buckets, dtype=np.int64)
    fractions = np.arange(1, _BUCKETS + 1) / _BUCKETS
    return np.unique(np.quantile(sizes, fractions, method="higher")).astype(np.int64)


def _rounded(samples: int) -> int:
    """The number itself up to 8, else the next lower multiple of 8."""
    return samples if samples < 8 else samples - samples % 8


def _cuts(counts: Sequence[int], most: Sequence[int]) -> tuple[Indices, bool]:
    """Where the global batches of a row of buckets start.

    Args:
        counts: Number of samples in each bucket.
        most: Most samples of a global batch that begins in each bucket.

    Returns:
        The starts and the end of the last, int64 [batches + 1]; and whether the last one is full.
    """
    starts, end, total = [0], 0, sum(counts)
    for count, size in zip(counts, most, strict=True):
        end += count
        while starts[-1] < end:
            starts.append(starts[-1] + size)
    is_full = starts[-1] <= total
    return np.array([*starts[:-1], min(starts[-1], total)]), is_full
