"""Statistics of timed blocks: bootstrap intervals, and where the steady state begins (MSER, Mann-Kendall)."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence

import numpy as np

from isotrain.analysis.compare.records import MIN_RUNS, Estimate

RESAMPLES = 2000
CONFIDENCE = 0.95
_NORMAL = 1.959964
_STUDENT = (
    *(12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179),
    *(2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064),
)
"""97.5 % quantiles of Student's distribution with 1, 2, ... degrees of freedom."""
MATERIAL = 0.03
"""A drift below this share of the block time is not worth waiting for."""
_LEAST = 8
"""Minimum number of blocks for a decision."""
_END = 5
"""The last blocks, at which no truncation is tried: their variance is an accident."""
_SIGNIFICANT = 2.58
"""Critical value of the normal distribution: 1 %, two-sided."""
_ROBUST = 3 * 1.4826
"""Median absolute deviations that make three standard deviations of normal noise."""

Statistic = Callable[[np.ndarray], np.ndarray]
"""A statistic of blocks, from shape [blocks, resamples, columns] to shape [resamples], float64."""


class Bootstrap:
    """Hierarchical bootstrap of a statistic over repeated runs and the blocks within them.

    Efron's bootstrap (1979): runs vary more than the blocks of one run, so runs are redrawn first and then
    the blocks of each (Davison and Hinkley, "Bootstrap Methods and their Application", 1997, section 3.8; for
    benchmarks Kalibera and Jones, "Rigorous Benchmarking in Reasonable Time", ISMM 2013).

    Attributes:
        value: Mean of the statistic over the runs.
        draws: Mean of the statistic for each resample, shape [RESAMPLES], float64.
        runs: Number of runs.
    """

    def __init__(self, value: float, draws: np.ndarray, runs: int) -> None:
        self.value = value
        self.draws = draws
        self.runs = runs

    @classmethod
    def of_runs(
        cls, runs: Sequence[np.ndarray], statistic: Statistic, generator: np.random.Generator
    ) -> Bootstrap:
        """Resamples runs, each with its blocks `[blocks, columns]`, float64, and blocks within them."""
        value = float(np.mean([statistic(run[:, None, :])[0] for run in runs]))
        within = np.stack([_redrawn(run, statistic, generator) for run in runs])
        chosen = generator.integers(len(runs), size=(len(runs), RESAMPLES))
        # A run that is drawn twice has its blocks redrawn twice: another resample's will do.
        shuffled = generator.integers(RESAMPLES, size=chosen.shape)
        return cls(value, within[chosen, shuffled].mean(axis=0), len(runs))

    @classmethod
    def of_values(cls, values: Sequence[float], generator: np.random.Generator) -> Bootstrap:
        """Resamples runs that have one number each."""
        runs = [np.array([[value]], dtype=np.float64) for value in values]
        return cls.of_runs(runs, mean, generator)

    def relative_to(self, other: Bootstrap) -> Bootstrap:
        """The ratio of two independent measurements."""
        runs = min(self.runs, other.runs)
        return Bootstrap(self.value / other.value, self.draws / other.draws, runs)

    def scaled(self, factor: float) -> Bootstrap:
        """The measurement times a constant."""
        return Bootstrap(self.value * factor, self.draws * factor, self.runs)

    def estimate(self) -> Estimate:
        """The value with its 95 % interval.

        The percentiles of a bootstrap over few runs lie too close together (Hesterberg, "What
        Teachers Should Know About the Bootstrap", The American Statistician 69(4), 2015, section
        3.2): they are moved outwards as for Student's t with as many runs. With less than
        `MIN_RUNS` there is no telling how runs differ, and the percentiles stay as they are.
        """
        low, high = np.percentile(self.draws, [50 - 50 * CONFIDENCE, 50 + 50 * CONFIDENCE])
        factor = _widening(self.runs)
        if min(low, self.value) > 0:  # a share of the value, so that no end is below zero
            return Estimate(
                self.value,
                float(self.value * (min(low, self.value) / self.value) ** factor),
                float(self.value * (max(high, self.value) / self.value) ** factor),
            )
        return Estimate(
            self.value,
            float(self.value - factor * max(0.0, self.value - low)),
            float(self.value + factor * max(0.0, high - self.value)),
        )


def _redrawn(run: np.ndarray, statistic: Statistic, generator: np.random.Generator) -> np.ndarray:
    """The statistic of `RESAMPLES` resamples of a run's blocks, shape [RESAMPLES]."""
    drawn = generator.integers(len(run), size=(len(run), RESAMPLES))
    return statistic(run[drawn])


def _widening(runs: int) -> float:
    if runs < MIN_RUNS:
        return 1.0
    student = _STUDENT[runs - 2] if runs - 2 < len(_STUDENT) else _NORMAL
    return student / _NORMAL * math.sqrt(runs / (runs - 1))


def mean(blocks: np.ndarray) -> np.ndarray:
    """The mean of the first column, shape [resamples]."""
    values: np.ndarray = blocks[..., 0].mean(axis=0)
    return values


def rate(blocks: np.ndarray) -> np.ndarray:
    """The sum of the first column divided by that of the second, shape [resamples]."""
    values: np.ndarray = blocks[..., 0].sum(axis=0) / blocks[..., 1].sum(axis=0)
    return values


def quantile(level: float) -> Statistic:
    """A statistic: the quantile of the first column."""

    def of(blocks: np.ndarray) -> np.ndarray:
        values: np.ndarray = np.quantile(blocks[..., 0], level, axis=0)
        return values

    return of


def steady_state_start(times: Sequence[float]) -> int | None:
    """Finds the block from which on the times (positive seconds per sample, by block) are steady.

    The warm-up ends where the marginal standard error of what remains is least (MSER: White, "An
    effective truncation heuristic for bias reduction in simulation output", Simulation 69(6), 1997);
    as there, a warm-up of more than half of the blocks means that there are too few of them. What
    remains must not drift either: no trend that is both significant (Mann, "Nonparametric tests
    against trend", Econometrica 13(3), 1945) and larger than `MATERIAL`. Single slow blocks, which
    any machine has, are first clipped to three standard deviations.

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
    """Number of first values of a vector to drop for the least standard error (MSER: White 1997)."""
    count = len(values)
    errors = [
        float(np.sum((values[start:] - values[start:].mean()) ** 2)) / (count - start) ** 2
        for start in range(count - _END + 1)
    ]
    return int(np.argmin(errors))


def _drifts(values: np.ndarray) -> bool:
    """Whether a vector of values has a trend (Mann 1945, Kendall 1975) that changes its median materially."""
    half = len(values) // 2
    change = statistics.median(values[-half:]) / statistics.median(values[:half]) - 1
    return abs(change) > MATERIAL and abs(_mann_kendall(values)) > _SIGNIFICANT


def _mann_kendall(values: np.ndarray) -> float:
    """The z-score of the Mann-Kendall trend test on a vector: positive if later values tend to be larger."""
    count = len(values)
    later = np.sign(values[None, :] - values[:, None])
    score = float(np.triu(later, 1).sum())
    variance = count * (count - 1) * (2 * count + 5) / 18
    return (score - math.copysign(1.0, score)) / math.sqrt(variance) if score else 0.0
