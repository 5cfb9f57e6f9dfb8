"""Fingerprints of tensors: a few dozen numbers from which the distance of two tensors is estimated.

The heart of a fingerprint is a count sketch: every element is added, with a random sign, to one of a few
buckets (M. Charikar, K. Chen, M. Farach-Colton, "Finding frequent items in data streams", 2002). Buckets
and signs depend on the tensor's shape alone, so the map is linear, and like the projections of W. Johnson and
J. Lindenstrauss ("Extensions of Lipschitz mappings into a Hilbert space", 1984) it keeps lengths: the
squared length of the sketch of a difference is the squared length of the difference, on average. Its
relative standard deviation is sqrt(2 / BUCKETS), 25 %, where the difference is spread over the buckets.

A tensor is a matrix here, whose rows are along its first axis, and a few rows are a block. The signs of a
block are those of the one before it, moved by a column. So what is equal in all blocks has another sum in
each of `_TURN` blocks, and no period along an axis cancels everywhere. In a block, buckets go round with the
column, which is quick; where they begin and the sign of the whole block are random. A column of one block is
a sum of adjacent rows, so a matrix is read in the order of its memory, also if columns are adjacent there, as
in Keras' kernels.
"""

from __future__ import annotations

import base64
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
_BLOCKS = 16
"""Number of blocks that a matrix with as many rows has at least, so that a column is in several buckets."""
_TURN = 16
"""Number of adjacent blocks of different signs; a power of two."""
_BLOCK_ROWS = (64, 16, 4, 1)
"""Numbers of rows of a block; each is a square, see `_signs`."""
_SIGNS = 1 << 17
"""Number of signs that stay in the cache, beside the elements that they belong to."""
_CHUNK = 1 << 17
"""Number of elements that stay in the cache from one use to the next."""
_ROW = 1 << 10
"""Number of columns of a vector, and of elements whose squares are added up in their own type."""
_PRODUCT = 1 << 13
"""Number of elements of a matrix that BLAS multiplies without threads, which cost more than they save."""
_RANGE = (1e-15, 1e15)
"""Norms of float32 tensors of which no sum of squares overflows or loses what is small."""


@dataclass(frozen=True)
class Fingerprint:
    """A count sketch, the norm and some elements of a tensor, as float64.

    Attributes:
        size: Number of elements.
        floating: Whether the dtype is floating-point.
        norm: Euclidean norm.
        sketch: All elements of a tensor of up to `WHOLE` elements, else `BUCKETS` signed bucket sums.
        sample: All elements of a tensor of up to `WHOLE` elements, else `SAMPLES` of them, at positions
            that depend on the shape alone.
    """

    size: int
    floating: bool
    norm: float
    sketch: tuple[float, ...]
    sample: tuple[float, ...]

    def to_list(self) -> list[Any]:
        """The attributes as plain JSON values, in their order; null for a sample equal to the sketch.

        Sketch and sample are the base64 text of float64 numbers, little-endian: JSON writes numbers slowly.
        """
        sample = None if self.sample == self.sketch else _to_text(self.sample)
        return [self.size, self.floating, self.norm, _to_text(self.sketch), sample]


def from_list(fields: Sequence[Any]) -> Fingerprint:
    """The inverse of `Fingerprint.to_list`."""
    size, floating, norm, sketch, sample = fields
    elements = _from_text(sketch)
    return Fingerprint(
        size, floating, norm, elements, elements if sample is None else _from_text(sample)
    )


def _to_text(numbers: Sequence[float]) -> str:
    return base64.b64encode(np.array(numbers, "<f8").tobytes()).decode()


def _from_text(text: str) -> tuple[float, ...]:
    return tuple(np.frombuffer(base64.b64decode(text), "<f8").tolist())


def fingerprint(array: np.ndarray) -> Fingerprint:
    """Computes the fingerprint of an array of any shape and numeric dtype.

    It is quickest where the first axis is the first or the last one of the memory. Blocks of float32 are
    added up in float32, and their sums in float64.
    """
    floating = array.dtype.kind not in "biu"
    if array.size <= WHOLE:
        whole = tuple(array.reshape(-1).astype(np.float64).tolist())
        return Fingerprint(array.size, floating, length(whole), whole, whole)
    sample = array[_positions(array.shape)].astype(np.float64)
    norm, sketch = _norm_and_sketch(array)
    return Fingerprint(array.size, floating, norm, tuple(sketch.tolist()), tuple(sample.tolist()))


def _norm_and_sketch(array: np.ndarray) -> tuple[float, np.ndarray]:
    if array.dtype == np.float32:
        with np.errstate(over="ignore", invalid="ignore"):
            squares, sketch = _squares_and_sketch(array)
        norm = math.sqrt(squares)
        if _RANGE[0] < norm < _RANGE[1] or not array.any():
            return norm, sketch
    squares, sketch = _squares_and_sketch(array.astype(np.float64, copy=False))
    return math.sqrt(squares), sketch


def _squares_and_sketch(array: np.ndarray) -> tuple[float, np.ndarray]:
    """The sum of squares of a tensor of float32 or float64, and its sketch."""
    if array.ndim == 1:
        padded = np.zeros((-(-array.size // _ROW), _ROW), array.dtype)
        padded.reshape(-1)[: array.size] = array
        array = padded
    axes = _axes_of_turned_memory(array)
    if axes is None:
        squares, sums = _block_sums(np.ascontiguousarray(array).reshape(len(array), -1))
    else:
        squares, sums = _turned_block_sums(array, axes)
    return squares, _sketch(sums)


def _axes_of_turned_memory(array: np.ndarray) -> tuple[int, ...] | None:
    """The other axes in the order of the memory, if the first axis is the last one there; else None."""
    if array.flags.c_contiguous:
        return None
    axes = tuple(sorted(range(1, array.ndim), key=lambda axis: -array.strides[axis]))
    return axes if array.transpose(*axes, 0).flags.c_contiguous else None


def _block_sums(matrix: np.ndarray) -> tuple[float, np.ndarray]:
    """The sum of squares of a matrix, and the sums of the columns of its blocks, with signs.

    Returns:
        A number, and an array of the matrix's dtype, shape `[blocks, columns]`.
    """
    rows, columns = matrix.shape
    block = _rows_of_a_block(rows, columns)
    signs = _signs(matrix.dtype, block, columns)
    sums = np.empty((-(-rows // block), columns), matrix.dtype)
    squares = 0.0
    blocks = 1 << (max(1, _CHUNK // (block * columns)).bit_length() - 1)
    turn = min(blocks, _TURN)
    for first in range(0, len(sums), blocks):
        part, out = matrix[first * block : (first + blocks) * block], sums[first : first + blocks]
        squares += _squares(part.reshape(-1))
        factors = signs[first % _TURN :][:turn]
        whole = len(part) // block
        turned, rest = whole - whole % turn, whole % turn
        by_block = part[: whole * block].reshape(whole, block, columns)
        if turned:
            by_turn = by_block[:turned].reshape(-1, turn, block, columns)
            totals = out[:turned].reshape(-1, turn, columns)
            np.einsum("tbrc,brc->tbc", by_turn, factors, out=totals)
        if rest:
            np.einsum("brc,brc->bc", by_block[turned:], factors[:rest], out=out[turned:whole])
        if len(part) % block:
            last = part[whole * block :]
            np.einsum("rc,rc->c", last, factors[rest, : len(last)], out=out[-1])
    return squares, sums


def _turned_block_sums(array: np.ndarray, axes: tuple[int, ...]) -> tuple[float, np.ndarray]:
    """Does as `_block_sums` with a tensor that has its first axis last in memory, and `axes` before it."""
    rows, columns = len(array), array.size // len(array)
    block = _rows_of_a_block(rows, columns)
    memory = array.transpose(*axes, 0)
    lines = memory.reshape(columns, rows)
    signs, places = _turned_signs(array.dtype, block, array.shape[1:], axes)
    blocks = -(-rows // block)
    sums = np.empty((columns, blocks), array.dtype)
    squares = 0.0
    step = max(1, _CHUNK // rows)
    signed = np.zeros((min(step, columns), blocks * block), array.dtype)
    turned = rows - rows % (_TURN * block)
    for start in range(0, columns, step):
        here = slice(start, start + step)
        part, out = lines[here], signed[: columns - start]
        squares += _squares(part.reshape(-1))
        factors = signs[here] if places is None else signs[places[here]]
        if turned:
            by_turn = part[:, :turned].reshape(len(part), -1, _TURN * block)
            totals = out[:, :turned].reshape(by_turn.shape)
            np.multiply(by_turn, factors[:, None], out=totals)
        np.multiply(part[:, turned:], factors[:, : rows - turned], out=out[:, turned:rows])
        _row_sums(out.reshape(-1, block), sums[here].reshape(-1))
    by_axis = sums.reshape(*memory.shape[:-1], -1).transpose(-1, *np.argsort(axes))
    return squares, by_axis.reshape(-1, columns)


def _row_sums(matrix: np.ndarray, out: np.ndarray) -> None:
    """Adds up short rows, which BLAS does faster than `sum`."""
    rows, columns = matrix.shape
    ones = np.ones(columns, matrix.dtype)
    product = _PRODUCT // columns
    whole = rows - rows % product
    if whole:
        by_product = matrix[:whole].reshape(-1, product, columns)
        np.matmul(by_product, ones, out=out[:whole].reshape(-1, product))
    np.matmul(matrix[whole:], ones, out=out[whole:])


def _rows_of_a_block(rows: int, columns: int) -> int:
    """The largest of `_BLOCK_ROWS` that leaves enough blocks, and not too many signs."""
    most = min(rows // _BLOCKS, _SIGNS // columns)
    return next(number for number in _BLOCK_ROWS if number <= max(1, most))


def _squares(vector: np.ndarray) -> float:
    if vector.size <= _ROW:
        return float(np.dot(vector, vector))
    whole = vector.size - vector.size % _ROW
    by_row, rest = vector[:whole].reshape(-1, 1, _ROW), vector[whole:]
    squares = np.matmul(by_row, by_row.transpose(0, 2, 1)).sum(dtype=np.float64)
    return float(squares) + float(np.dot(rest, rest))


def _sketch(sums: np.ndarray) -> np.ndarray:
    """The bucket sums of a matrix from the column sums of its blocks, shape `[blocks, columns]`.

    What is equal in all blocks does not add up: each has a sign, and its buckets begin at another one. So it
    is with parts of a block's columns, where blocks are few.
    """
    blocks, columns = sums.shape
    groups = -(-columns // BUCKETS)
    parts = min(groups, -(-_BLOCKS // blocks))
    padded = np.zeros((blocks, -(-groups // parts) * parts * BUCKETS))
    padded[:, :columns] = sums
    by_bucket = padded.reshape(blocks * parts, -1, BUCKETS).sum(axis=1)
    signs, places = _turns(blocks * parts)
    sketch: np.ndarray = np.einsum("b,bk->k", signs, by_bucket.take(places))
    return sketch


@functools.lru_cache(maxsize=256)
def _turns(blocks: int) -> tuple[np.ndarray, np.ndarray]:
    """Signs of blocks, float64, and where their buckets are in turned order, shape `[blocks, BUCKETS]`."""
    generator = np.random.Generator(np.random.PCG64(blocks))
    signs = 2.0 * generator.integers(2, size=blocks) - 1.0
    turned = (np.arange(BUCKETS) + generator.integers(BUCKETS, size=(blocks, 1))) % BUCKETS
    return signs, turned + BUCKETS * np.arange(blocks)[:, None]


@functools.lru_cache(maxsize=256)
def _signs(dtype: np.dtype[Any], rows: int, columns: int) -> np.ndarray:
    """The signs of the elements of `_TURN` blocks, of a dtype, shape `[_TURN, rows, columns]`.

    It is a view, in which the signs of a block are those of the one before it, moved by a column.
    """
    windows = np.lib.stride_tricks.sliding_window_view(
        _row_of_signs(dtype, rows, columns), columns, axis=1
    )
    return windows.transpose(1, 0, 2)


def _row_of_signs(dtype: np.dtype[Any], rows: int, columns: int) -> np.ndarray:
    """The signs of which all blocks have a part, shape `[rows, columns + _TURN - 1]`."""
    drawn = _drawn_signs(dtype, rows, max(columns, _SIGNS // rows) + _TURN - 1)
    return drawn[:, : columns + _TURN - 1]


@functools.lru_cache(maxsize=16)
def _drawn_signs(dtype: np.dtype[Any], rows: int, columns: int) -> np.ndarray:
    """Signs of a dtype, shape `[rows, columns]`; PCG64 draws them.

    Of a column's n signs, one is there sqrt(n) times more than the other. So a column of equal numbers keeps
    its length to the digit, and two signs of a column are still equal half of the time.
    """
    generator = np.random.Generator(np.random.PCG64(BUCKETS))
    column = np.where(np.arange(rows) < (rows + math.isqrt(rows)) // 2, 1, -1)
    signs = generator.permuted(np.repeat(column[:, None], columns, axis=1), axis=0)
    return np.asarray(signs * (2 * generator.integers(2, size=columns) - 1), dtype)


@functools.lru_cache(maxsize=256)
def _turned_signs(
    dtype: np.dtype[Any], rows: int, shape: tuple[int, ...], axes: tuple[int, ...]
) -> tuple[np.ndarray, np.ndarray | None]:
    """The signs of `_TURN` blocks in turned memory, and the columns in its order if that is another.

    Returns:
        A view of shape `[columns, _TURN * rows]`, and indices of its first axis, or None.
    """
    columns = math.prod(shape)
    flat = np.ascontiguousarray(_row_of_signs(dtype, rows, columns).T).reshape(-1)
    signs = np.lib.stride_tricks.sliding_window_view(flat, _TURN * rows)[::rows]
    if axes == tuple(sorted(axes)):
        return signs, None
    order = np.arange(columns).reshape(shape).transpose([axis - 1 for axis in axes])
    return signs, order.reshape(-1)


@functools.lru_cache(maxsize=256)
def _positions(shape: tuple[int, ...]) -> tuple[np.ndarray, ...]:
    """Pseudorandom positions in a tensor, `SAMPLES` indices for each of its axes."""
    size = math.prod(shape)
    generator = np.random.Generator(np.random.PCG64(size))
    return np.unravel_index(generator.integers(size, size=SAMPLES), shape)


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

    The sketch is linear, so everything is exact up to rounding, but for the norm, which it estimates.
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
    return Fingerprint(
        size=tensors[0].size,
        floating=tensors[0].floating,
        norm=length(sketch),
        sketch=sketch,
        sample=sample,
    )


def means(replicas: Sequence[Mapping[str, Fingerprint]]) -> dict[str, Fingerprint]:
    """The fingerprint of the mean over replicas of every tensor, by name."""
    return {name: mean([tensors[name] for tensors in replicas]) for name in replicas[0]}


def mean(tensors: Sequence[Fingerprint]) -> Fingerprint:
    """The fingerprint of the mean of tensors."""
    return combination([1.0 / len(tensors)] * len(tensors), tensors)
