"""Fingerprints of tensors: a few dozen numbers from which the distance of two tensors is estimated.

The heart of a fingerprint is a count sketch: every element is added, with a random sign, to one of a few
buckets (M. Charikar, K. Chen, M. Farach-Colton, "Finding frequent items in data streams", 2002). Buckets
and signs depend on the tensor's size alone, so the map is linear, and like the projections of W. Johnson and
J. Lindenstrauss ("Extensions of Lipschitz mappings into a Hilbert space", 1984) it keeps lengths: the
squared length of the sketch of a difference is the squared length of the difference, on average. Its
relative standard deviation is sqrt(2 / BUCKETS), 25 %, where the difference is spread over the buckets. These
go round with the position, which is quick, and their number is a prime, so that no axis stays in one of them.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

BUCKETS = 31
SAMPLES = 16
WHOLE = 64
"""Largest number of elements of a tensor that is its own sketch."""
_ROW = BUCKETS << 5
_BLOCK = BUCKETS << 12
_STRIP = 8
"""Columns that are copied together, of a matrix with at least `_ROW` rows."""
_RANGE = (1e-15, 1e15)
"""Norms of float32 tensors of which no sum of squares overflows or loses what is small."""


@dataclass(frozen=True)
class Fingerprint:
    """A count sketch and summary statistics of a tensor, computed in float64.

    Attributes:
        size: Number of elements.
        floating: Whether the dtype is floating-point.
        norm: Euclidean norm.
        mean: Mean of the elements.
        max_abs: Largest absolute value.
        sketch: All elements of a tensor of up to `WHOLE` elements, else `BUCKETS` signed bucket sums.
        sample: All elements of a tensor of up to `WHOLE` elements, else `SAMPLES` of them, at positions
            that depend on the size alone.
    """

    size: int
    floating: bool
    norm: float
    mean: float
    max_abs: float
    sketch: tuple[float, ...]
    sample: tuple[float, ...]

    def to_list(self) -> list[Any]:
        """The attributes as plain JSON values, in their order; null for a sample equal to the sketch."""
        sample = None if self.sample == self.sketch else list(self.sample)
        numbers = [self.size, self.floating, self.norm, self.mean, self.max_abs]
        return [*numbers, list(self.sketch), sample]


def from_list(fields: Sequence[Any]) -> Fingerprint:
    """The inverse of `Fingerprint.to_list`."""
    size, floating, norm, average, largest, sketch, sample = fields
    sample = sketch if sample is None else sample
    return Fingerprint(size, floating, norm, average, largest, tuple(sketch), tuple(sample))


def fingerprint(array: np.ndarray) -> Fingerprint:
    """Computes the fingerprint of an array of any shape and numeric dtype, in row-major order.

    It reads blocks that stay in the processor's cache, without the threads of BLAS, which cost more than they
    save. Blocks of float32 are added up in float32, and their sums in float64.
    """
    flat = _row_major(array).reshape(-1)
    if flat.dtype != np.float32 or flat.size <= WHOLE:
        return _fingerprint(flat, np.dtype(np.float64))
    with np.errstate(over="ignore", invalid="ignore"):
        taken = _fingerprint(flat, flat.dtype)
    if taken.max_abs == 0 or _RANGE[0] < taken.norm < _RANGE[1]:
        return taken
    return _fingerprint(flat, np.dtype(np.float64))  # squares of float32 may overflow or vanish


def _row_major(array: np.ndarray) -> np.ndarray:
    """An array in row-major order; one with turned axes is copied in strips that stay in the cache.

    NumPy by itself reads a line of the cache for each element of a large transposed matrix.
    """
    if array.flags.c_contiguous or array.ndim < 2 or not array.size:
        return np.ascontiguousarray(array)
    copied = np.empty(array.shape, array.dtype)
    columns = array.shape[1]
    width = max(_STRIP, _STRIP * _ROW * columns // array.size)
    for start in range(0, columns, width):
        strip = slice(start, start + width)
        copied[:, strip] = array[:, strip]
    return copied


def _fingerprint(flat: np.ndarray, dtype: np.dtype[Any]) -> Fingerprint:
    """The fingerprint of a vector, whose blocks are computed with in `dtype`."""
    is_small = flat.size <= WHOLE
    squares, total, largest = 0.0, 0.0, [0.0]
    rows = []
    for start in range(0, flat.size, _BLOCK):
        part = flat[start : start + _BLOCK]
        values = part if part.dtype == dtype else part.astype(dtype)
        squares += float(_column_sums(values, values).sum())
        total += float(_column_sums(values).sum())
        largest += [float(part.max()), -float(part.min())]
        if not is_small:
            rows.append(_bucket_sums(_column_sums(values, _signs(dtype)[: part.size])))
    sample = tuple((flat if is_small else flat[_positions(flat.size)]).astype(np.float64).tolist())
    return Fingerprint(
        size=flat.size,
        floating=flat.dtype.kind not in "biu",
        norm=math.sqrt(squares),
        mean=total / flat.size if flat.size else 0.0,
        max_abs=float(np.max(largest)),
        sketch=sample if is_small else _sum_of_blocks(np.array(rows), flat.size),
        sample=sample,
    )


def _column_sums(values: np.ndarray, factors: np.ndarray | None = None) -> np.ndarray:
    """Sums of a vector of up to `_BLOCK` elements over equal positions modulo `_ROW`.

    Args:
        values: Vector.
        factors: What each element is multiplied by, of the same dtype and size; None for 1.

    Returns:
        A vector of up to `_ROW` elements, float64 if there are so many.
    """
    whole = values.size - values.size % _ROW  # NumPy adds long rows faster than one vector
    rest = values[whole:] if factors is None else values[whole:] * factors[whole:]
    if not whole:
        return rest
    rows = values[:whole].reshape(-1, _ROW)
    sums = np.zeros(_ROW)
    if factors is None:
        sums += rows.sum(axis=0)
    else:
        sums += np.einsum("rc,rc->c", rows, factors[:whole].reshape(-1, _ROW))
    sums[: rest.size] += rest
    return sums


def _bucket_sums(columns: np.ndarray) -> np.ndarray:
    """Sums of a vector over equal positions modulo BUCKETS, float64."""
    padded = np.zeros(-(-columns.size // BUCKETS) * BUCKETS)
    padded[: columns.size] = columns
    by_bucket: np.ndarray = padded.reshape(-1, BUCKETS).sum(axis=0)
    return by_bucket


def _sum_of_blocks(rows: np.ndarray, size: int) -> tuple[float, ...]:
    """The sum of the bucket sums of blocks, each with a sign and a rotation of its own.

    So blocks share the signs of elements, and what is equal in all of them does not add up.
    """
    if len(rows) == 1:
        return tuple(rows[0].tolist())
    generator = np.random.Generator(np.random.PCG64(size))
    signs = 2 * generator.integers(2, size=(len(rows), 1)) - 1
    shifts = generator.integers(BUCKETS, size=(len(rows), 1))
    turned = np.take_along_axis(rows, (np.arange(BUCKETS) + shifts) % BUCKETS, axis=1)
    return tuple((signs * turned).sum(axis=0).tolist())


@functools.lru_cache(maxsize=2)
def _signs(dtype: np.dtype[Any]) -> np.ndarray:
    """The signs of a block's elements, of a dtype; PCG64 draws them."""
    generator = np.random.Generator(np.random.PCG64(BUCKETS))
    return (2 * generator.integers(2, size=_BLOCK) - 1).astype(dtype)


@functools.lru_cache(maxsize=256)
def _positions(size: int) -> np.ndarray:
    """Pseudorandom positions in a flat tensor of `size` elements, int64, shape `[SAMPLES]`."""
    return np.random.Generator(np.random.PCG64(size)).integers(size, size=SAMPLES)


def length(vector: Sequence[float]) -> float:
    """The Euclidean norm, computed without overflow."""
    return math.hypot(*vector)


def distance(one: Fingerprint, other: Fingerprint) -> float:
    """The estimated norm of the difference of two tensors; infinite where just one is finite."""
    if one.size != other.size or math.isfinite(one.norm) != math.isfinite(other.norm):
        return math.inf
    if not math.isfinite(one.norm):
        return 0.0
    return length([a - b for a, b in zip(one.sketch, other.sketch, strict=True)])


def difference(one: Fingerprint, other: Fingerprint) -> float:
    """The estimated norm of the difference of two tensors, relative to the larger of their norms.

    Returns:
        A number from 0 to about 2; infinite where one has numbers that are not finite and the other has
        not, or where the sizes differ; 0 where neither is finite.
    """
    norm = distance(one, other)
    return norm / max(one.norm, other.norm) if math.isfinite(norm) and norm else norm


def combination(factors: Sequence[float], tensors: Sequence[Fingerprint]) -> Fingerprint:
    """The fingerprint of a sum of tensors, each times its factor.

    Everything but the norm (estimated from the sketch) and the largest value (a bound) is exact up to
    rounding to float32, because the sketch is linear.
    """
    if len(tensors) == 1 and factors[0] == 1.0:
        return tensors[0]
    sketch, sample = (
        tuple(sum(f * x for f, x in zip(factors, column, strict=True)) for column in columns)
        for columns in (
            zip(*(tensor.sketch for tensor in tensors), strict=True),
            zip(*(tensor.sample for tensor in tensors), strict=True),
        )
    )
    pairs = list(zip(factors, tensors, strict=True))
    return Fingerprint(
        size=tensors[0].size,
        floating=tensors[0].floating,
        norm=length(sketch),
        mean=sum(factor * tensor.mean for factor, tensor in pairs),
        max_abs=sum(abs(factor) * tensor.max_abs for factor, tensor in pairs),
        sketch=sketch,
        sample=sample,
    )


def means(replicas: Sequence[Mapping[str, Fingerprint]]) -> dict[str, Fingerprint]:
    """The fingerprint of the mean over replicas of every tensor, by name."""
    return {name: mean([tensors[name] for tensors in replicas]) for name in replicas[0]}


def mean(tensors: Sequence[Fingerprint]) -> Fingerprint:
    """The fingerprint of the mean of tensors."""
    return combination([1.0 / len(tensors)] * len(tensors), tensors)
