"""What a parameter-server run measures of itself."""

from __future__ import annotations

from collections import Counter
from typing import Any

from isotrain.core.contracts.process import rank_of
from isotrain.core.served.workforce import WorkResult, LostWorker


class ParameterServerStats:
    """Staleness of the updates, and who did how much."""

    def __init__(self) -> None:
        self._staleness: Counter[int] = Counter()
        self._slices: Counter[int] = Counter()
        self._lag = 0

    def hand_out(self, lag: int) -> None:
        """Notes that a slice is handed out, with weights that lack so many global batches before it."""
        self._lag = max(self._lag, lag)

    def count(self, answer: WorkResult, updates: int) -> None:
        """Notes that an answer is used.

        Args:
            answer: Which.
            updates: In the weights it is applied to, before it.
        """
        self._staleness[updates - answer.version] += 1
        if answer.worker is not None:
            self._slices[answer.worker] += 1

    def report(self, updates: int, lost: list[LostWorker]) -> dict[str, Any]:
        """As plain JSON values."""
        slices = self._staleness.total()
        total = sum(lag * count for lag, count in self._staleness.items())
        return {
            "slices": slices,
            "updates": updates,
            "staleness_mean": total / slices if slices else 0.0,
            "staleness_max": max(self._staleness, default=0),
            "staleness_histogram": {str(n): self._staleness[n] for n in sorted(self._staleness)},
            "lag_max": self._lag,
            "slices_by_worker": {str(rank_of(n)): self._slices[n] for n in sorted(self._slices)},
            "workers_lost": [
                {"rank": loss.rank, "step": loss.step, "reason": loss.reason} for loss in lost
            ],
        }
