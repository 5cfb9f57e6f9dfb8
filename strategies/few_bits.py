"""Vectors in 8 or 4 bits an element, in blocks that share a scale.

Blocks of 256 elements are divided by their largest magnitude and rounded to whole numbers. An int32 that is
sent has four or eight of these.
"""

from __future__ import annotations

from typing import Any

from isotrain.plugin import Replica, Tensor, TensorFunctions

BLOCK = 256
"""Elements that share a scale."""
_TINY = 1e-30


def to_few_bits(ops: TensorFunctions, vector: Tensor, bits: int) -> tuple[Tensor, Tensor, Tensor]:
    """Rounds a vector, shape `[n]`.

    Returns:
        Packed elements, int32 `[blocks, 256 * bits / 32]`; scales, `[blocks, 1]`; and rounding errors, `[n]`.
    """
    length = vector.shape[0]
    padding = ops.zeros((-length % BLOCK,), vector.dtype)
    blocks = ops.reshape(ops.concatenate([vector, padding]), (-1, BLOCK))
    scales = _block_maxima(ops, ops.abs(blocks))
    scales = ops.maximum(scales, ops.zeros_like(scales) + _TINY)
    packed = _pack(ops, blocks / scales, bits)
    errors = blocks - _unpack(ops, packed, bits, vector.dtype) * scales
    return packed, scales, ops.reshape(errors, (-1,))[:length]


def mean_from_few_bits(
    replica: Replica, packed: Tensor, scales: Tensor, bits: int, length: int
) -> Tensor:
    """Mean of the rounded vectors of all replicas, equal to the bit on all of them. Local.

    Args:
        replica: The replica that computes it.
        packed: Packed elements of all replicas, stacked.
        scales: Their scales, stacked.
        bits: Bits of an element.
        length: Length of a vector.
    """
    ops = replica.ops
    total = _unpack(ops, packed[0], bits, scales.dtype) * scales[0]
    for index in range(1, replica.replicas):  # in this order everywhere, for equal sums
        total = total + _unpack(ops, packed[index], bits, scales.dtype) * scales[index]
    return ops.reshape(total / replica.replicas, (-1,))[:length]


def _block_maxima(ops: TensorFunctions, blocks: Tensor) -> Tensor:
    """Largest element of each row: shape `[rows, columns]`, a power of two, to `[rows, 1]`."""
    while blocks.shape[1] > 1:
        half = blocks.shape[1] // 2
        blocks = ops.maximum(blocks[:, :half], blocks[:, half:])
    return blocks


def _pack(ops: TensorFunctions, blocks: Tensor, bits: int) -> Tensor:
    """Numbers from -1 to 1 as digits of int32s, each from -127 to 127, or from -7 to 7.

    Shape `[rows, columns]` to `[rows, columns * bits / 32]`.
    """
    largest = 2 ** (bits - 1) - 1
    digits = ops.cast(blocks * largest + (largest + 0.5), "int32") - largest  # the cast cuts off
    width = blocks.shape[1] * bits // 32
    packed = digits[:, -width:]
    for start in range(blocks.shape[1] - 2 * width, -1, -width):
        packed = packed * 2**bits + digits[:, start : start + width]
    return packed


def _unpack(ops: TensorFunctions, packed: Tensor, bits: int, dtype: Any) -> Tensor:
    """The numbers from -1 to 1 that `_pack` has rounded."""
    largest = 2 ** (bits - 1) - 1
    columns = []
    for _ in range(32 // bits):
        digit = (packed + largest) % 2**bits - largest
        packed = (packed - digit) // 2**bits
        columns.append(digit)
    return ops.cast(ops.concatenate(columns, axis=1), dtype) / largest
