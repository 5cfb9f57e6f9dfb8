"""Orders of data in several parts: mixed by ratios, one part after the other, or joined."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from isotrain.core.data.order.order import Order, equal_batches, numbered
from isotrain.core.data.order.permutation import permutation, random_of
from isotrain.core.data.order.samples import Samples

if TYPE_CHECKING:
    from isotrain.core.data.sampler import Indices

Part = tuple[int, Callable[["Indices"], "Indices"]]
"""Samples of a part of the data: their number, and a function from ranks in the part to positions."""


def interleaved(
    data: Samples, parts: Sequence[Part], ratios: Sequence[float], samples: int | None = None
) -> Order:
    """Parts of the data mixed by ratios, each begun again when it has been used up.

    The samples of a part are spread evenly over the epoch, when shuffled with a random offset each. The next
    epoch continues in each part where this one ends.

    Args:
        data: The samples.
        parts: The parts, none of them empty.
        ratios: Ratio of each part, larger than 0.
        samples: Number of samples in an epoch; None for the length of the data set.
    """
    total = samples or data.length
    counts = _apportioned(total, ratios)

    def positions(epoch: int) -> Indices:
        random = random_of(data.seed, epoch, 1)
        moments, drawn = [], []
        for number, ((length, position_of), count) in enumerate(zip(parts, counts, strict=True)):
            offsets = random.random(count) if data.shuffle else np.full(count, 0.5)
            moments.append((np.arange(count) + offsets) / max(count, 1))
            drawn.append(position_of(_continued(data, number, length, epoch * count, count)))
        order = np.argsort(np.concatenate(moments), kind="stable")
        return numbered(np.concatenate(drawn)[order], data.length)

    return equal_batches(data, positions, total, repeats=True)


def _apportioned(total: int, ratios: Sequence[float]) -> list[int]:
    """Whole numbers in these ratios that add up to `total`, by the largest remainders."""
    exact = np.array(ratios) / sum(ratios) * total
    counts = np.floor(exact).astype(np.int64)
    largest = np.argsort(counts - exact, kind="stable")[: total - counts.sum()]
    counts[largest] += 1
    return [int(count) for count in counts]


def _continued(data: Samples, part: int, length: int, start: int, count: int) -> Indices:
    """Ranks `start` to `start + count` in an endless row of passes over a part, int64 [count]."""
    if not data.shuffle:
        return np.arange(start, start + count) % length
    drawn = [np.empty(0, dtype=np.int64)]
    while count:
        cycle, first = divmod(start, length)
        last = min(length, first + count)
        drawn.append(permutation(data.seed, (cycle, 2, part), length)[first:last])
        start, count = start + last - first, count - (last - first)
    return np.concatenate(drawn)


def in_turn(data: Samples, lengths: Sequence[int]) -> Order:
    """Consecutive parts of the data one after the other, each shuffled in itself.

    Args:
        data: The samples.
        lengths: Number of samples of each part.
    """
    starts = np.cumsum([0, *lengths])

    def positions(epoch: int) -> Indices:
        return np.concatenate(
            [
                starts[part] + _continued(data, part, length, epoch * length, length)
                for part, length in enumerate(lengths)
            ]
        )

    return equal_batches(data, positions)


def joined(data: Samples, lengths: Sequence[int]) -> Order:
    """Rows of one sample of each part; parts with fewer samples are begun again.

    Args:
        data: As many samples as an epoch has rows.
        lengths: Number of samples of each part.

    Returns:
        An order whose positions are `data.length` plus a number whose digits, in the bases of the lengths,
        are the positions in the parts; the first part has the lowest.
    """

    def positions(epoch: int) -> Indices:
        rows = np.full(data.length, data.length)
        for part, length in enumerate(lengths):
            ranks = _continued(data, part, length, epoch * data.length, data.length)
            rows += ranks * math.prod(lengths[:part])
        return rows

    return equal_batches(data, positions)
