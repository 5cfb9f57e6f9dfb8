"""The loss that travels with the gradients instead of in a collective of its own."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from isotrain.adapters.torch.program import Objective


class CarriedLoss(nn.Module):
    """An objective with one more parameter, whose gradient is the loss: what averages gradients averages it.

    The parameter stays 0, so neither the loss nor its other gradients change.
    """

    def __init__(self, objective: Objective, device: torch.device, dtype: torch.dtype) -> None:
        """Wraps an objective.

        Args:
            objective: Gives loss and predictions, as `Program.objective` does.
            device: Of the parameter.
            dtype: Of the parameter: that of the others, to travel in one message with them.
        """
        super().__init__()
        self.objective = objective
        # of one dimension: torch's PowerSGD takes no parameters without any
        self.carrier = nn.Parameter(torch.zeros(1, device=device, dtype=dtype))

    def forward(self, inputs: Any, targets: Any) -> tuple[torch.Tensor, Any]:
        """As the objective."""
        loss, predictions = self.objective(inputs, targets)
        return torch.addcmul(loss, self.carrier.reshape(()), loss.detach()), predictions

    def taken(self) -> torch.Tensor | None:
        """What the backward passes since the last call, and the exchange after them, have made of it."""
        mean, self.carrier.grad = self.carrier.grad, None
        return None if mean is None else mean.reshape(()).clone()
