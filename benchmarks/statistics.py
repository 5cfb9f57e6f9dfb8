"""Statistics of the benchmarks' timings."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

_RESAMPLES = 2000


@dataclass(frozen=True)
class Estimate:
    """A median with its 95 % bootstrap interval."""

    value: float
    low: float
    high: float

    def text(self, unit: str = "", digits: int = 3) -> str:
        """The estimate as people read it."""
        numbers = [f"{number:.{digits}f}" for number in (self.value, self.low, self.high)]
        return f"{numbers[0]} [{numbers[1]}, {numbers[2]}]{unit}"


def median(values: np.ndarray) -> Estimate:
    """The median of paired measurements, a vector, and its percentile-bootstrap interval (Efron 1979)."""
    generator = np.random.default_rng(0)
    drawn = generator.choice(values, (_RESAMPLES, len(values)))
    low, high = np.percentile(np.median(drawn, axis=1), [2.5, 97.5])
    return Estimate(float(np.median(values)), float(low), float(high))
