"""Base class of optimizers for native torch models that update one parameter group after the other."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from typing import Any

import torch


class GroupwiseOptimizer(torch.optim.Optimizer):
    """Optimizer whose subclasses say how the weights of a parameter group are updated."""

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Updates every parameter that has a gradient, in place."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            weights = [weight for weight in group["params"] if weight.grad is not None]
            if weights:
                self.update(weights, group)
        return loss

    @abstractmethod
    def update(self, weights: list[torch.Tensor], group: dict[str, Any]) -> None:
        """Updates weights of any shapes, which all have gradients, in place by the options of their group."""
