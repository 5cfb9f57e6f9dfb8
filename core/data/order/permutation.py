"""Permutations of the samples of an epoch, drawn from a seed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np

from isotrain.core.data.sample_rng import GOLDEN, mixed
from isotrain.core.errors import DataError

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from isotrain.core.data.sampler import Indices

LARGEST_IN_MEMORY = 2**24
"""Samples up to which a permutation is an array, 128 MiB; larger ones are computed by position."""
_ROUNDS = 8
_BLOCK = 2**14


class Positions(Protocol):
    """Positions in the data set by rank in the epoch; a NumPy array is one."""

    def __getitem__(self, ranks: slice, /) -> Indices:
        """Positions of consecutive ranks, int64 [stop - start]."""


def random_of(seed: int, *key: int) -> np.random.Generator:
    """The generator (PCG64) of a seed and a key, such as the index of the epoch.

    Raises:
        DataError: The seed is negative.
    """
    if seed < 0:
        raise DataError(f"seed: expected 0 or more, received {seed}.")
    return np.random.Generator(np.random.PCG64(np.random.SeedSequence(seed, spawn_key=key)))


def permutation(seed: int, key: tuple[int, ...], length: int) -> Positions:
    """A permutation of 0 .. length - 1: the samples in an order that seed and key determine.

    Up to 2^24 samples it is a Fisher-Yates shuffle, beyond that a keyed bijection in O(1) memory.

    Args:
        seed: The spec's seed, 0 or more.
        key: The index of the epoch, from 0, and what else distinguishes permutations of one seed.
        length: Number of samples.

    Raises:
        DataError: The seed is negative.
    """
    generator = random_of(seed, *key)
    if length <= LARGEST_IN_MEMORY:
        return generator.permutation(length).astype(np.int64, copy=False)
    return _InBlocks(Bijection(length, generator.integers(2**64, size=_ROUNDS, dtype=np.uint64)))


@dataclass(frozen=True)
class Range:
    """The positions 0 .. length - 1 in order."""

    length: int

    def __getitem__(self, ranks: slice) -> Indices:
        """Positions of consecutive ranks, int64 [stop - start]."""
        return np.arange(ranks.start, min(ranks.stop, self.length), dtype=np.int64)


@dataclass(frozen=True)
class Bijection:
    """A keyed permutation of 0 .. length - 1 that is computed by position, without an array.

    It is a Feistel network on the smallest power of two that is large enough. Results outside of the range
    are encrypted again until they are inside ("cycle walking": Black and Rogaway, "Ciphers with arbitrary
    finite domains", CT-RSA 2002), at most once on average. Its rounds are a hash, not a cipher's: it is for
    shuffling, not for secrets.

    Attributes:
        length: Number of positions, 2 or more.
        keys: Keys of the rounds, uint64 [rounds], an even number.
    """

    length: int
    keys: NDArray[np.uint64]

    def __getitem__(self, ranks: slice) -> Indices:
        """Positions of consecutive ranks, int64 [stop - start]."""
        values = np.arange(ranks.start, min(ranks.stop, self.length), dtype=np.uint64)
        values = self._encrypted(values)
        while (outside := np.flatnonzero(values >= self.length)).size:
            values[outside] = self._encrypted(values[outside])
        return values.astype(np.int64)

    def _encrypted(self, values: NDArray[np.uint64]) -> NDArray[np.uint64]:
        """A permutation of the powers of two, elementwise on uint64 of any shape."""
        bits = (self.length - 1).bit_length()
        low_bits, high_bits = np.uint64(bits // 2), np.uint64(bits - bits // 2)
        low, high = _lowest(values, low_bits), values >> low_bits
        for number, key in enumerate(self.keys):
            hashed = mixed((low + np.uint64(1)) * np.uint64(GOLDEN) ^ key)
            low, high = high ^ _lowest(hashed, low_bits if number % 2 else high_bits), low
        return (high << low_bits) | low


class _InBlocks:
    """A bijection computed for many consecutive ranks at once, which costs a tenth per rank."""

    def __init__(self, bijection: Bijection) -> None:
        self._bijection = bijection
        self._start, self._block = 0, bijection[0:0]

    def __getitem__(self, ranks: slice) -> Indices:
        start, stop = ranks.start, min(ranks.stop, self._bijection.length)
        if not self._start <= start <= stop <= self._start + len(self._block):
            self._start = start
            self._block = self._bijection[start : max(stop, start + _BLOCK)]
        return self._block[start - self._start : stop - self._start]


def _lowest(values: NDArray[np.uint64], bits: np.uint64) -> NDArray[np.uint64]:
    """The lowest bits of each value, uint64 of the same shape."""
    return values & ((np.uint64(1) << bits) - np.uint64(1))
