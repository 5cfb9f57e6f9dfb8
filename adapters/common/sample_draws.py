"""Random numbers by sample: keys and counters of Threefry-2x32, and distributions, on any framework."""

from __future__ import annotations

import contextlib
import copy
import functools
import math
import operator
import zlib
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from isotrain.plugin import SampleDraws, SpecError, active_draws

_ROTATIONS = (13, 15, 26, 6, 17, 29, 16, 24)
_PARITY = 0x1BD11BDA
_ROUNDS = 20
_WORD = 0xFFFFFFFF
REFUSAL = (
    "random_layers: per-sample: {} draws random numbers that are not by sample. Draw them by isotrain.random,"
    " outside of loops; or use random_layers: per-replica."
)
"""Message for random numbers that cannot be drawn by sample; what draws them is filled in."""
REFUSAL_WITH_REPRODUCIBLE = (
    "reproducible: {} draws random numbers by replica. Set random_layers: per-sample and draw them by"
    " isotrain.random, or leave reproducible out."
)
"""Message for such random numbers in a run that is `reproducible` and has none by sample."""
BITS = 23
"""Random bits of a number: float32 has these, a half added, exactly."""

_LARGEST_BELOW_ONE = {"bfloat16": 1 - 2.0**-8, "float16": 1 - 2.0**-11}
"""Largest number below 1 of each narrow dtype."""


def threefry_2x32(
    key: tuple[Any, Any], counter: tuple[Any, Any], rotated: Callable[[Any, int], Any]
) -> tuple[Any, Any]:
    """The generator Threefry-2x32 with 20 rounds (Salmon et al., "Parallel random numbers", SC 2011).

    Args:
        key: Two 32-bit words, integer tensors that broadcast to the counter.
        counter: Two words, tensors of one shape.
        rotated: Rotates the bits of a tensor to the left; may do so in place.

    Returns:
        Two random words, of the shape of the counter.
    """
    keys = (*key, key[0] ^ key[1] ^ _PARITY)
    first, second = counter[0] + keys[0], counter[1] + keys[1]
    for index in range(_ROUNDS):
        first += second
        second = rotated(second, _ROTATIONS[index % len(_ROTATIONS)])
        second ^= first
        if index % 4 == 3:
            injection = index // 4 + 1
            first += keys[injection % 3]
            second += keys[(injection + 1) % 3] + injection
    return first, second


def rotated_words(words: np.ndarray, bits: int) -> np.ndarray:
    """Rotates uint32 words, any shape, to the left."""
    rotated: np.ndarray = (words << np.uint32(bits)) | (words >> np.uint32(32 - bits))
    return rotated


class DrawKeys:
    """Keys of the draws of a run: functions of the seed, an update and the number of the draw in a pass.

    Attributes:
        update: Name of the update that passes belong to; empty if there is one.
    """

    def __init__(self, seed: int) -> None:
        """Takes the spec's seed."""
        self.update = ""
        self._seed = [np.array([seed >> shift & _WORD], np.uint32) for shift in (0, 32)]
        self._keys: dict[tuple[str, int], tuple[int, int]] = {}

    def of_draw(self, number: int) -> tuple[int, int]:
        """Key of the draw of this number in a pass: two words from 0 to 2^32 - 1."""
        label = self.update, number
        if label not in self._keys:
            counter = [
                np.array([word], np.uint32) for word in (zlib.crc32(self.update.encode()), number)
            ]
            words = threefry_2x32(tuple(self._seed), tuple(counter), rotated_words)  # type: ignore[arg-type]
            self._keys[label] = int(words[0][0]), int(words[1][0])
        return self._keys[label]


class PassDraws(SampleDraws):
    """Random numbers of one replica in a pass over one slice.

    The step is added to the second word of a draw's key. The counter is the index of the sample in the global
    batch, and half the index of the number in the sample's draw: each counter gives two numbers.

    Attributes:
        draws: Number of draws so far in the pass.
    """

    math: Any
    """Module of the framework with `log`, `sqrt`, `cos` and `sin`."""

    def __init__(self, keys: DrawKeys, position: Any, rows: Any, is_training: bool) -> None:
        """Starts a pass.

        Args:
            keys: Keys of the run's draws.
            position: Word of the step, and index of the first sample in the global batch, shape `[2]`.
            rows: Number of rows of the slice.
            is_training: Whether it is a pass of training.
        """
        self.is_training = is_training
        self.draws = 0
        self._keys = keys
        self._position = position
        self._rows = rows

    @abstractmethod
    def cast(self, x: Any, dtype: Any) -> Any:
        """A tensor in another dtype, which may be a name."""

    @abstractmethod
    def _integers(self, key: tuple[int, int], rows: Any, blocks: Any, by_sample: bool) -> Any:
        """Random integers.

        Args:
            key: Key of the draw.
            rows: Number of samples.
            blocks: Half the number of integers per sample.
            by_sample: Whether the rows are the samples of the slice, not one row for all samples.

        Returns:
            Integers from 0 to `2 ** BITS - 1`, int32, shape `[rows, 2 * blocks]`.
        """

    def integers(self, shape: Sequence[Any]) -> Any:
        """Random integers from 0 to `2 ** BITS - 1`, int32; of a shape `[]` the same for all samples.

        They may be a view of numbers that are kept for other slices: do not write to them.

        Raises:
            SpecError: The first axis of the shape is not that of the slice's samples.
        """
        return self._in_shape(self._next_integers(shape), shape)

    def _next_integers(self, shape: Sequence[Any]) -> Any:
        """Integers of the next draw, shape `[rows, 2 * blocks]`: a few more than the shape has."""
        rows = shape[0] if len(shape) else 1
        if (
            len(shape)
            and isinstance(rows, int)
            and isinstance(self._rows, int)
            and rows != self._rows
        ):
            raise SpecError(
                f"random_layers: per-sample: expected {self._rows} samples in the first axis of random"
                f" numbers, received the shape {tuple(shape)}. Draw numbers of the shape [batch, ...], or of"
                " the shape [] for all samples together; or use random_layers: per-replica."
            )
        blocks = (functools.reduce(operator.mul, shape[1:], 1) + 1) // 2
        key = self._keys.of_draw(self.draws)
        self.draws += 1
        return self._integers(key, rows, blocks, bool(len(shape)))

    @abstractmethod
    def _in_shape(self, x: Any, shape: Sequence[Any]) -> Any:
        """The first numbers of each row of a matrix, in a shape `[rows, ...]`, or the very first for `[]`."""

    @abstractmethod
    def _halves(self, x: Any) -> tuple[Any, Any]:
        """The numbers of even and of odd indices of each row."""

    @abstractmethod
    def _interleaved(self, even: Any, odd: Any) -> Any:
        """The inverse of `_halves`."""

    def uniform(self, shape: Sequence[Any], dtype: Any) -> Any:
        """Uniform numbers between 0 and 1, exclusive: odd multiples of 2^-24, rounded in narrow dtypes."""
        units = self._in_shape(self._units(shape, dtype), shape)
        narrow = next((name for name in _LARGEST_BELOW_ONE if name in str(dtype)), None)
        if narrow is not None:  # others are exact
            units = self._at_most(units, _LARGEST_BELOW_ONE[narrow])
        return self.cast(units, dtype)

    @abstractmethod
    def _at_most(self, x: Any, largest: float) -> Any:
        """A tensor of any shape whose larger numbers are replaced by the largest one allowed."""

    def _units(self, shape: Sequence[Any], dtype: Any) -> Any:
        """Uniform numbers of the next draw, in a matrix, float64 or float32."""
        wide = "float64" if "float64" in str(dtype) else "float32"
        return self.cast(self._next_integers(shape), wide) * 2.0**-BITS + 2.0 ** -(BITS + 1)

    def normal(self, shape: Sequence[Any], dtype: Any) -> Any:
        """Standard normal numbers by the transform of Box and Muller (1958), two of two uniform ones."""
        unit, turn = self._halves(self._units(shape, dtype))
        radius, angle = self.math.sqrt(self.math.log(unit) * -2.0), turn * (2 * math.pi)
        pairs = radius * self.math.cos(angle), radius * self.math.sin(angle)
        return self.cast(self._in_shape(self._interleaved(*pairs), shape), dtype)

    def bernoulli(self, shape: Sequence[Any], p: float, dtype: Any) -> Any:
        """Numbers that are 1 with probability `p`, rounded to a multiple of `2 ** -BITS`, else 0."""
        return self.cast(self.integers(shape) < round(p * 2**BITS), dtype)

    @abstractmethod
    def shape_of(self, x: Any) -> Sequence[Any]:
        """Sizes of a tensor's axes."""

    def uniform_like(self, x: Any) -> Any:
        return self.uniform(self.shape_of(x), x.dtype)

    def normal_like(self, x: Any) -> Any:
        return self.normal(self.shape_of(x), x.dtype)

    def bernoulli_like(self, x: Any, p: float) -> Any:
        return self.bernoulli(self.shape_of(x), p, x.dtype)


@contextlib.contextmanager
def active(draws: SampleDraws | None) -> Iterator[None]:
    """Context in which this thread draws from a pass, or, of None, not by sample."""
    token = active_draws.set(draws)
    try:
        yield
    finally:
        active_draws.reset(token)


def repeatable(function: Callable[..., Any]) -> Callable[..., Any]:
    """Makes a function draw the same random numbers by sample at each call: for recomputation."""
    draws = active_draws.get()
    if not isinstance(draws, PassDraws):
        return function
    start = copy.copy(draws)

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        repeated = copy.copy(start)
        with active(repeated):
            result = function(*args, **kwargs)
        draws.draws = max(draws.draws, repeated.draws)
        return result

    return call
