"""Random numbers by sample on torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from isotrain.adapters.common.sample_draws import BITS, PassDraws, threefry_2x32

_LIBRARY = torch.library.Library("isotrain_random", "DEF")
_LIBRARY.define(
    "integers(Tensor position, int[] key, int rows, int blocks, bool by_sample) -> Tensor"
)
_CHUNK = 1 << 15
"""Number of counters that a CPU computes at once: their words stay in its cache."""


def _integers(
    position: torch.Tensor, key: Sequence[int], rows: int, blocks: int, by_sample: bool
) -> torch.Tensor:
    """Random integers of `PassDraws`: one operation, whose position a captured graph takes as an argument."""
    samples = torch.arange(rows, dtype=torch.int32, device=position.device)
    if by_sample:
        samples += position[1]
    numbers = torch.arange(blocks, dtype=torch.int32, device=position.device)
    counters = [
        each.expand(rows, blocks).reshape(-1) for each in (samples[:, None], numbers[None, :])
    ]
    keys = position.new_tensor(_signed(key[0])), position[0] + _signed(key[1])
    results = position.new_empty((rows * blocks, 2))
    chunk = _CHUNK if position.device.type == "cpu" else max(rows * blocks, 1)
    parts = (each.split(chunk) for each in (*counters, results))
    for first, second, result in zip(*parts, strict=True):
        words = threefry_2x32(keys, (first, second), _rotated)
        torch.stack(words, -1, out=result)
    results >>= 32 - BITS
    results &= (1 << BITS) - 1
    return results.view(rows, 2 * blocks)


def _rotated(words: torch.Tensor, bits: int) -> torch.Tensor:
    """Rotates int32 words, any shape, to the left, in place."""
    low = words >> (32 - bits)
    low &= (1 << bits) - 1
    words <<= bits
    words |= low
    return words


def _signed(word: int) -> int:
    """A word from 0 to 2^32 - 1 as the int32 of the same bits."""
    return word - (1 << 32) if word >> 31 else word


_LIBRARY.impl("integers", _integers, "CompositeExplicitAutograd")


class TorchPassDraws(PassDraws):
    """Random numbers by sample of one pass; the position is an int32 tensor that is set in place."""

    math = torch

    def cast(self, x: torch.Tensor, dtype: str | torch.dtype) -> torch.Tensor:
        resolved: Any = getattr(torch, dtype) if isinstance(dtype, str) else dtype
        return x.to(resolved)

    def _integers(
        self, key: tuple[int, int], rows: int, blocks: int, by_sample: bool
    ) -> torch.Tensor:
        integers: torch.Tensor = torch.ops.isotrain_random.integers(
            self._position, key, rows, blocks, by_sample
        )
        return integers

    def _in_shape(self, x: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
        if not len(shape):
            return x[0, 0]
        width = 1
        for size in shape[1:]:
            width *= size
        return x[:, :width].reshape(tuple(shape))

    def _halves(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x[:, 0::2], x[:, 1::2]

    def _interleaved(self, even: torch.Tensor, odd: torch.Tensor) -> torch.Tensor:
        return torch.stack((even, odd), -1).reshape(even.shape[0], -1)

    def _at_most(self, x: torch.Tensor, largest: float) -> torch.Tensor:
        return x.clamp(max=largest)

    def shape_of(self, x: torch.Tensor) -> Sequence[int]:
        return x.shape
