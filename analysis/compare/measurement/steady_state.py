"""Detection of the steady state in a sequence of block times (MSER, Mann-Kendall)."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

import numpy as np

MATERIAL = 0.03
"""A drift below this share of the block time is not worth waiting for."""
_LEAST = 8
"""Least number of blocks for a decision."""
_END = 5
"""The last blocks, at which no truncation is tried: their variance is an accident."""
_SIGNIFICANT = 2.58
"""Critical value of the normal distribution: 1 %, two-sided."""
_ROBUST = 3 * 1.4826
"""Median absolute deviations that make three standard deviations of normal noise."""


def steady_state_start(times: Sequence[float]) -> int | None:
    """Finds the block from which on the times are steady.

    The warm-up ends where the marginal standard error of what remains is least (MSER: White, "An
    effective truncation heuristic for bias reduction in simulation output", Simulation 69(6), 1997);
    as there, a warm-up of more than half of the blocks means that there are too few of them. What
    remains must not drift either: no trend that is both significant (Mann, "Nonparametric tests
    against trend", Econometrica 13(3), 1945) and larger than `MATERIAL`. Single slow blocks, which
    any machine has, are first clipped to three standard deviations.

    Args:
        times: Seconds per sample of each block; positive.

    Returns:
        Index of the first steady block; None if there is none yet.
    """
    if len(times) < _LEAST:
        return None
    values = _drawn_in(np.asarray(times, dtype=np.float64))
    start = _truncation(values)
    if start > len(values) // 2:
        return None
    return None if _drifts(values[start:]) else start


def _drawn_in(values: np.ndarray) -> np.ndarray:
    """Clips outliers by the spread of the later half; shape [blocks], float64."""
    late = values[len(values) // 2 :]
    middle = np.median(late)
    spread = _ROBUST * np.median(np.abs(late - middle))
    reach = max(spread, MATERIAL * middle)
    clipped: np.ndarray = np.clip(values, middle - reach, middle + reach)
    return clipped


def _truncation(values: np.ndarray) -> int:
    """Number of first values to drop so that the standard error of the rest is least (MSER)."""
    count = len(values)
    errors = [
        float(np.sum((values[start:] - values[start:].mean()) ** 2)) / (count - start) ** 2
        for start in range(count - _END + 1)
    ]
    return int(np.argmin(errors))


def _drifts(values: np.ndarray) -> bool:
    half = len(values) // 2
    change = statistics.median(values[-half:]) / statistics.median(values[:half]) - 1
    return abs(change) > MATERIAL and abs(_mann_kendall(values)) > _SIGNIFICANT


def _mann_kendall(values: np.ndarray) -> float:
    """The z-score of the Mann-Kendall trend test: positive if later values tend to be larger."""
    count = len(values)
    later = np.sign(values[None, :] - values[:, None])
    score = float(np.triu(later, 1).sum())
    variance = count * (count - 1) * (2 * count + 5) / 18
    return (score - math.copysign(1.0, score)) / math.sqrt(variance) if score else 0.0
