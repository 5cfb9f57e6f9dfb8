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
_LIBRARY.define(
    "integers_of_draws(Tensor position, int[] keys, int rows, int[] blocks, bool by_sample) -> Tensor[]"
)
CHUNK = 1 << 15
"""Number of counters that a CPU computes at once: their words stay in its cache."""


def _integers(
    position: torch.Tensor, key: Sequence[int], rows: int, blocks: int, by_sample: bool
) -> torch.Tensor:
    """Random integers of `PassDraws`: one operation, whose position a captured graph takes as an argument."""
    return _integers_of_draws(position, key, rows, [blocks], by_sample)[0]


def _integers_of_draws(
    position: torch.Tensor,
    keys: Sequence[int],
    rows: int,
    blocks: Sequence[int],
    by_sample: bool,
) -> list[torch.Tensor]:
    """Integers of several draws with a pair of `keys` each, as `_integers`.

    A small draw takes some hundred operations whatever its size. So small draws are computed at once for all
    samples that this replica has in the step, and kept for its next slices.

    Args:
        position: As of `PassDraws`; then may come the first and the number of the replica's samples.
        keys: Keys of the draws, one after the other.
        rows: As of `PassDraws._integers`.
        blocks: As there, of each draw.
        by_sample: As there.
    """
    is_known = position.device.type == "cpu" and type(position) is torch.Tensor  # it may be fake
    if is_known and by_sample:
        step, first, *local = position.tolist()
        start, samples = local or (first, rows)
        is_part = rows < samples and start <= first and first + rows <= start + samples
        if is_part and samples * sum(blocks) <= CHUNK:
            draws = _STEP_DRAWS.of((step, start, samples), tuple(keys), tuple(blocks))
            return [each[first - start : first - start + rows] for each in draws]
    return _computed(position, keys, rows, blocks, by_sample)


class _StepDraws:
    """Draws of all samples that a replica has in a step."""

    def __init__(self) -> None:
        self._step: tuple[int, int, int] | None = None
        self._draws: dict[Any, list[torch.Tensor]] = {}

    def of(
        self, step: tuple[int, int, int], keys: tuple[int, ...], blocks: tuple[int, ...]
    ) -> list[torch.Tensor]:
        """Integers of draws, shapes `[samples, 2 * blocks]`.

        Args:
            step: Word of the step, and first and number of the samples.
            keys: Pairs of keys.
            blocks: Half the number of integers per sample, of each draw.
        """
        if step != self._step:
            self._step = step
            self._draws.clear()
        if (keys, blocks) not in self._draws:
            position = torch.tensor(step[:2], dtype=torch.int32)
            self._draws[keys, blocks] = _computed(position, keys, step[2], blocks, by_sample=True)
        return self._draws[keys, blocks]


_STEP_DRAWS = _StepDraws()


def _computed(
    position: torch.Tensor,
    keys: Sequence[int],
    rows: int,
    blocks: Sequence[int],
    by_sample: bool,
) -> list[torch.Tensor]:
    """Computes what `_integers_of_draws` returns."""
    samples = torch.arange(rows, dtype=torch.int32, device=position.device)
    if by_sample:
        samples += position[1]
    words: list[tuple[torch.Tensor, ...]] = []
    for index, width in enumerate(blocks):
        numbers = torch.arange(width, dtype=torch.int32, device=position.device)
        first, second = map(_signed, keys[2 * index : 2 * index + 2])
        key = position.new_tensor(first), position[0] + second
        words.append(
            tuple(
                each.expand(rows, width).reshape(-1) for each in (samples[:, None], numbers, *key)
            )
        )
    merged = words[0] if len(words) == 1 else tuple(map(torch.cat, zip(*words, strict=True)))
    results = position.new_empty((rows * sum(blocks), 2))
    chunk = CHUNK if position.device.type == "cpu" else max(len(results), 1)
    parts = (each.split(chunk) for each in (*merged, results))
    for sample, number, first_key, second_key, result in zip(*parts, strict=True):
        random = threefry_2x32((first_key, second_key), (sample, number), _rotated)
        torch.stack(random, -1, out=result)
    results >>= 32 - BITS
    results &= (1 << BITS) - 1
    parts_of_draws = zip(results.split([rows * width for width in blocks]), blocks, strict=True)
    return [each.view(rows, 2 * width) for each, width in parts_of_draws]


def _rotated(words: torch.Tensor, bits: int) -> torch.Tensor:
    """Rotates int32 words, any shape, to the left."""
    low = words >> (32 - bits)
    low &= (1 << bits) - 1
    return low.add_(words, alpha=1 << bits)


def _signed(word: int) -> int:
    """A word from 0 to 2^32 - 1 as the int32 of the same bits."""
    return word - (1 << 32) if word >> 31 else word


_LIBRARY.impl("integers", _integers, "CompositeExplicitAutograd")
_LIBRARY.impl("integers_of_draws", _integers_of_draws, "CompositeExplicitAutograd")


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
