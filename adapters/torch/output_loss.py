"""The loss of each of several outputs of a native model, as a metric."""

from __future__ import annotations

from typing import Any

import torch

from isotrain.adapters.outputs import OutputSelector
from isotrain.adapters.torch.metrics import Metric
from isotrain.adapters.torch.native_loss import TotalLoss, PerOutputLoss


class OutputLossMetric(Metric):
    """The loss of one output, over all that counts in it, before `loss_weights` multiplies it."""

    takes_weights = True

    def __init__(self, part: PerOutputLoss, device: torch.device) -> None:
        """Starts with no samples."""
        self.name = f"{part.output}_loss"
        self._part = part
        self._total = torch.zeros(2, dtype=torch.float64, device=device)
        self.sums = [self._total]

    def update(self, targets: Any, predictions: Any, count: int) -> None:
        own = OutputSelector().sample(targets, predictions, self._part.output)
        mean = self._part.measured(*own).double()
        if self._part.loss_denominators is None:
            self._total += torch.stack([mean * count, torch.full_like(mean, count)])
            return
        counted = self._part.loss_denominators(own[0]).to(mean)
        self._total += torch.stack([torch.where(counted > 0, mean * counted, 0.0), counted])

    def named_results(self) -> dict[str, float]:
        total, count = self._total.tolist()
        return {self.name: total / count if count else 0.0}


def output_losses(loss: TotalLoss | None, device: torch.device) -> list[Metric]:
    """One for each output that has a loss of its own; none where an objective gives the loss."""
    parts = [] if loss is None else loss.parts
    return [OutputLossMetric(part, device) for part in parts if part.output is not None]
