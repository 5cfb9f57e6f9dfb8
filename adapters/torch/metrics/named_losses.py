"""Means of the named losses that an objective returns, over all samples."""

from __future__ import annotations

from typing import Any

import torch

from isotrain.adapters.common.objective import MAX_LOSSES, Objective
from isotrain.adapters.torch.metrics.base import Metric


class NamedLosses(Metric):
    """Mean of each named loss of an objective; no results for objectives that return a single loss."""

    name = "objective"
    needs_predictions = False

    def __init__(self, objective: Objective, device: torch.device) -> None:
        """Starts with no samples, with sums on a device."""
        self._objective = objective
        self._total = torch.zeros(2, MAX_LOSSES, dtype=torch.float64, device=device)
        self.sums = [self._total]

    @property
    def is_unbuilt(self) -> bool:
        """Whether the objective was never called, so that the names are not known."""
        return self._objective.names is None

    def update(self, targets: Any, predictions: Any, count: int) -> None:
        if not self._objective.names:
            return
        for index, (mean, denominator) in enumerate(self._objective.latest):
            mean = mean.double()
            number = torch.full_like(mean, count) if denominator is None else denominator.double()
            self._total[:, index] += torch.stack([mean * number, number])

    def named_results(self) -> dict[str, float]:
        columns = zip(self._objective.names or (), *self._total.tolist(), strict=False)
        return {name: total / count if count else 0.0 for name, total, count in columns}
