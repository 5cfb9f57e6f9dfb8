"""The order of a run: the samples of every global batch, equal on all processes."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from isotrain.core.data import sampler
from isotrain.core.data.order.permutation import Positions, Range, permutation
from isotrain.core.data.order.samples import Samples

if TYPE_CHECKING:
    from isotrain.core.data.sampler import Indices

BatchAt = Callable[[int], "Indices"]
"""A function from the index of a global batch in its epoch to its positions, int64 [size]."""


@dataclass(frozen=True)
class Order:
    """The global batches of every epoch.

    Attributes:
        samples: Number of samples in an epoch, with those of a remainder that is dropped.
        steps_per_epoch: Number of global batches in an epoch, equal in all.
        batch_sizes: The different sizes of global batches.
        epoch: Function from the index of an epoch to its batches. A pure function, called once per epoch.
        is_sequential: Whether every epoch has the samples in the order of the data set.
        repeats: Whether an epoch may have a sample more than once. The n-th occurrence of position p, from
            0, is then p + n * the length of the data set, so that each has random numbers of its own.
        is_compared: Whether processes compare it, since data or a function of the user's decide it.
    """

    samples: int
    steps_per_epoch: int
    batch_sizes: frozenset[int]
    epoch: Callable[[int], BatchAt]
    is_sequential: bool = False
    repeats: bool = False
    is_compared: bool = True

    def fingerprint(self, positions: Indices) -> int:
        """A checksum of a global batch (int64 [size]) and of the length of an epoch."""
        length = np.array([self.samples, self.steps_per_epoch])
        return zlib.crc32(np.concatenate([length, positions]).tobytes())


MakeOrder = Callable[[Samples], Order]


def equal_batches(
    data: Samples,
    positions: Callable[[int], Positions],
    samples: int | None = None,
    *,
    is_sequential: bool = False,
    repeats: bool = False,
    is_compared: bool = True,
) -> Order:
    """An order cut into global batches of one size, of which the last may be smaller.

    Args:
        data: The samples.
        positions: Function from the index of an epoch to its positions.
        samples: Number of positions in an epoch; None for each sample once.
        is_sequential: See `Order`.
        repeats: See `Order`.
        is_compared: See `Order`.

    Raises:
        DataError: The remainder is dropped, and there is not one full global batch.
    """
    count, size = data.length if samples is None else samples, data.global_batch_size
    steps = sampler.steps_per_epoch(count, size, data.drop_remainder)

    def epoch(number: int) -> BatchAt:
        ordered = positions(number)
        return lambda index: ordered[index * size : min((index + 1) * size, count)]

    sizes = frozenset(min(size, count - index * size) for index in (0, steps - 1))
    return Order(count, steps, sizes, epoch, is_sequential, repeats, is_compared)


def sequential(data: Samples) -> Order:
    """The order of the data set, in every epoch."""
    order = Range(data.length)
    return equal_batches(data, lambda _: order, is_sequential=True, is_compared=False)


def shuffled(data: Samples) -> Order:
    """A new permutation of all samples in every epoch."""
    seed, length = data.seed, data.length
    return equal_batches(data, lambda epoch: permutation(seed, (epoch,), length), is_compared=False)


def numbered(positions: Indices, length: int) -> Indices:
    """Positions of an epoch, int64 [samples], with `length` added for each earlier occurrence of one."""
    by_value = np.argsort(positions, kind="stable")
    ordered = positions[by_value]
    is_first = np.r_[True, ordered[1:] != ordered[:-1]]
    ranks = np.arange(len(positions))
    result = np.empty_like(positions)
    result[by_value] = ordered + length * (ranks - np.maximum.accumulate(ranks * is_first))
    return result
