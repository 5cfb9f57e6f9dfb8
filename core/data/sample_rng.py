"""Random numbers for transforms, keyed by sample: independent of replicas, batches and processes."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from isotrain.core.errors import DataError

if TYPE_CHECKING:
    from isotrain.core.data.sampler import Indices

_MASK = (1 << 64) - 1
GOLDEN = 0x9E3779B97F4A7C15  # 2^64 divided by the golden ratio, odd: the step of the counter
_MAX_RANGE = 1 << 32

Shape = tuple[int, ...]
Partners = Callable[[int], "tuple[Any, Any, SampleRandom]"]


def mixed(bits: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The SplitMix64 finaliser (Steele et al. 2014), elementwise on uint64 of any shape.

    Every input bit flips each output bit about half of the time.
    """
    bits = (bits ^ (bits >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    bits = (bits ^ (bits >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return bits ^ (bits >> np.uint64(31))


def _absorbed(state: NDArray[np.uint64], words: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Hashes one more uint64 word into each state; shapes broadcast; injective in the words for a state."""
    return mixed(state + (words + np.uint64(1)) * np.uint64(GOLDEN))


def _word(value: int) -> NDArray[np.uint64]:
    """A Python integer modulo 2^64, shape [1]: an array, so that overflow wraps silently."""
    return np.array([value & _MASK], dtype=np.uint64)


class SampleRandom:
    """Draws one value (or array) per sample of a batch.

    Draw number n for a sample is a function of (seed, epoch, sample index, n) alone: it is the same
    however the global batch is split into replicas, micro-batches or processes, provided that the
    transform makes the same calls for every batch. So a transform decides per sample with masks
    (`numpy.where`), never by whether *any* sample of the batch drew something.

    The generator is counter-based: SplitMix64's finaliser over a key hashed from the three numbers
    plus the number of the draw (Steele, Lea and Flood, "Fast splittable pseudorandom number
    generators", OOPSLA 2014). It is for augmentation, not for cryptography.
    """

    def __init__(
        self, seed: int, epoch: int, indices: Indices, partners: Partners | None = None
    ) -> None:
        """Starts at draw 0 of some samples of an epoch.

        Args:
            seed: The spec's seed.
            epoch: Index of the epoch.
            indices: Positions of the samples in the data set, int64 [batch].
            partners: Function from the number of earlier calls to what `partner` returns; None for none.
        """
        state = _absorbed(_absorbed(_word(0), _word(seed)), _word(epoch))
        self._keys = _absorbed(state, np.asarray(indices, dtype=np.int64).astype(np.uint64))
        self._drawn = 0
        self._partners = partners
        self._partner_calls = 0

    def __len__(self) -> int:
        """Number of samples in the batch."""
        return len(self._keys)

    def uniform(
        self, low: float = 0.0, high: float = 1.0, shape: Shape = ()
    ) -> NDArray[np.float64]:
        """Uniform numbers of 53 random bits in [low, high).

        Args:
            low: Lower bound, may occur.
            high: Upper bound; occurs only where `low + (high - low) * u` rounds up to it.
            shape: Shape of one sample's draw.

        Returns:
            float64 [batch, *shape].
        """
        return low + (high - low) * self._unit(shape)

    def integers(self, low: int, high: int, shape: Shape = ()) -> NDArray[np.int64]:
        """Uniform integers in [low, high).

        Scaled from 53 random bits: no value's probability is off by more than a factor of
        1 +- (high - low) / 2^53, which is below 1 + 2^-21 for every range allowed.

        Returns:
            int64 [batch, *shape].

        Raises:
            DataError: The range is empty or wider than 2^32.
        """
        if not 0 < high - low <= _MAX_RANGE:
            raise DataError(
                f"integers(low={low}, high={high}): expected low < high and at most 2**32 values."
            )
        return low + np.floor(self._unit(shape) * (high - low)).astype(np.int64)

    def normal(self, mean: float = 0.0, std: float = 1.0, shape: Shape = ()) -> NDArray[np.float64]:
        """Normal numbers by the Box-Muller transform: two uniform draws for each.

        Returns:
            float64 [batch, *shape].
        """
        radius = np.sqrt(-2.0 * np.log1p(-self._unit(shape)))
        angle = (2.0 * math.pi) * self._unit(shape)
        return mean + std * (radius * np.cos(angle))

    def bernoulli(self, p: float = 0.5, shape: Shape = ()) -> NDArray[np.bool_]:
        """True with probability `p`.

        Returns:
            bool [batch, *shape].

        Raises:
            DataError: p is no probability.
        """
        if not 0.0 <= p <= 1.0:
            raise DataError(f"bernoulli(p={p}): expected a probability from 0 to 1.")
        return self._unit(shape) < p

    def partner(self) -> tuple[Any, Any, SampleRandom]:
        """Another sample of the global batch for each sample: a permutation keyed by seed, epoch and step.

        No sample is its own partner, unless it is alone in the global batch. Each call gives others.
        They are the same however the global batch is split.

        Returns:
            Inputs and targets of the partners as the data set has them, of shape [batch, ...]; and their
            random numbers, by which a transform makes of a partner what it makes of that sample itself.

        Raises:
            DataError: The samples are those of a stream that shards itself, or partners already.
        """
        if self._partners is None:
            raise DataError(
                "random.partner(): only this replica's samples are known here: the data shard themselves, or"
                " these are partners already. Let the data mix samples, or take a second partner of the first"
                " samples."
            )
        self._partner_calls += 1
        return self._partners(self._partner_calls - 1)

    def _unit(self, shape: Shape) -> NDArray[np.float64]:
        """The next draws as multiples of 2^-53 in [0, 1), float64 [batch, *shape]."""
        count = math.prod(shape)
        numbers = np.arange(self._drawn, self._drawn + count, dtype=np.uint64)
        self._drawn += count
        bits = _absorbed(self._keys[:, None], numbers[None, :])
        unit = (bits >> np.uint64(11)).astype(np.float64) * 2.0**-53
        return unit.reshape((len(self._keys), *shape))
