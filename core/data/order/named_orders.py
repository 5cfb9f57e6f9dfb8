"""The orders that a spec can name, beside sequential and shuffled."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np

from isotrain.core.data.order.by_length import by_length
from isotrain.core.data.order.mixing import interleaved
from isotrain.core.data.order.order import Order, equal_batches, numbered, sequential, shuffled
from isotrain.core.data.order.permutation import Positions, permutation, random_of
from isotrain.core.data.order.samples import Column, Samples, values_of
from isotrain.core.errors import DataError
from isotrain.core.quantities import counted

if TYPE_CHECKING:
    from isotrain.core.data.sampler import Indices


def weighted(
    data: Samples, *, weights: Column, samples: int | None = None, replacement: bool = True
) -> Order:
    """Samples drawn with probabilities proportional to their weights.

    Without replacement these are the smallest of exponential variables with the weights as rates, in that
    order (Efraimidis and Spirakis, "Weighted random sampling with a reservoir", 2006).

    Args:
        data: The samples.
        weights: Weight of each sample, 0 or more.
        samples: Number of samples in an epoch; None for the length of the data set, or, without replacement,
            for all whose weight is not 0.
        replacement: Whether a sample may be drawn again in the same epoch.

    Raises:
        DataError: The samples are not to be shuffled; or weights are negative or not finite, or fewer samples
            have one than are to be drawn.
    """
    values = values_of(weights, data, "order.weights").astype(np.float64)
    if not data.shuffle:
        raise DataError("shuffle: false, and the samples are drawn by weight. Leave shuffle out.")
    if not (np.isfinite(values).all() and (values >= 0).all() and values.any()):
        raise DataError("order.weights: expected finite numbers, 0 or more, and not all of them 0.")
    drawable = np.flatnonzero(values)
    count = samples or (data.length if replacement else len(drawable))
    if not replacement and count > len(drawable):
        raise DataError(
            f"order.samples: {count} without replacement; expected at most the"
            f" {counted(len(drawable), 'sample')} whose weight is not 0."
        )
    bounds = np.cumsum(values[drawable])

    def positions(epoch: int) -> Indices:
        random = random_of(data.seed, epoch, 1)
        if not replacement:
            return drawable[
                np.argsort(random.standard_exponential(len(bounds)) / values[drawable])[:count]
            ]
        drawn = np.searchsorted(bounds, random.random(count) * bounds[-1], side="right")
        return numbered(drawable[np.minimum(drawn, len(drawable) - 1)], data.length)

    return equal_batches(data, positions, count, repeats=replacement)


def balanced(data: Samples, *, by: Column = "targets", samples: int | None = None) -> Order:
    """Classes in equal numbers, in every global batch up to one or two samples.

    All samples of a class are used before one of them is again, over the epochs too.

    Args:
        data: The samples.
        by: Class of each sample, a whole number or a text.
        samples: Number of samples in an epoch; None for the length of the data set.
    """
    classes = values_of(by, data, "order.by", "biufU")
    if classes.dtype.kind == "f" and not np.equal(classes, np.round(classes)).all():
        raise DataError("order.by: expected classes as whole numbers; received other numbers.")
    _, class_of = np.unique(classes, return_inverse=True)
    groups = [np.flatnonzero(class_of == number) for number in range(class_of.max() + 1)]
    return interleaved(
        data, [(len(group), group.__getitem__) for group in groups], [1.0] * len(groups), samples
    )


def repeated(data: Samples, *, times: int) -> Order:
    """Each sample several times in a row, with random numbers of its own each (repeated augmentation).

    See Hoffer et al., "Augment your batch", CVPR 2020. The order of samples is shuffled.

    Args:
        data: The samples.
        times: How often each sample occurs in its global batch.

    Raises:
        DataError: The occurrences of a sample would be in two global batches.
    """
    if data.global_batch_size % times:
        raise DataError(
            f"order.times: {times} with a global batch of {data.global_batch_size}; expected a divisor of it,"
            " so that all occurrences of a sample are in one global batch."
        )

    def positions(epoch: int) -> _Repeated:
        return _Repeated(permutation(data.seed, (epoch,), data.length), data.length, times)

    return equal_batches(data, positions, data.length * times, repeats=True)


@dataclass(frozen=True)
class _Repeated:
    """Positions, each of them several times in a row."""

    positions: Positions
    length: int
    times: int

    def __getitem__(self, ranks: slice) -> Indices:
        occurrences = np.arange(ranks.start, ranks.stop)
        samples: Indices = self.positions[ranks.start // self.times : -(-ranks.stop // self.times)]
        result: Indices = np.repeat(samples, self.times) + self.length * (occurrences % self.times)
        return result


def called(data: Samples, *, call: Callable[..., Any]) -> Order:
    """An order of your own, from a function `(seed, epoch, length, columns) -> positions`.

    Raises:
        DataError: The positions are no whole numbers from 0 to `length - 1`, or their number differs between
            epochs.
    """

    @lru_cache(maxsize=1)
    def positions(epoch: int) -> Indices:
        made = np.asarray(call(data.seed, epoch, data.length, data.columns))
        if made.ndim != 1 or made.dtype.kind not in "iu" or not made.size:
            raise DataError(
                "order: expected the callable to return positions, whole numbers of shape [samples];"
                f" received {made.dtype} of shape {list(made.shape)} for epoch {epoch}."
            )
        if made.min() < 0 or made.max() >= data.length:
            raise DataError(
                f"order: expected positions from 0 to {data.length - 1}, received {made.min()} to"
                f" {made.max()} for epoch {epoch}."
            )
        return numbered(made.astype(np.int64), data.length)

    count = len(positions(0))

    def checked(epoch: int) -> Indices:
        if len(positions(epoch)) != count:
            raise DataError(
                f"order: expected equally many positions in every epoch, received {count} for epoch 0 and"
                f" {len(positions(epoch))} for epoch {epoch}."
            )
        return positions(epoch)

    return equal_batches(data, checked, count, repeats=True)


_ORDERS: dict[str, Callable[..., Order]] = {
    "sequential": sequential,
    "shuffled": shuffled,
    "weighted": weighted,
    "balanced": balanced,
    "repeated": repeated,
    "by-length": by_length,
    "call": called,
}


def ordered(data: Samples, name: str, options: Mapping[str, Any]) -> Order:
    """The order of a name, with its options."""
    return _ORDERS[name](data, **options)
