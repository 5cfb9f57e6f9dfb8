"""Lion optimizer for native torch models, which torch does not have."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from isotrain.adapters.torch.base import private_api
from isotrain.adapters.torch.optim.by_group import GroupwiseOptimizer


class Lion(GroupwiseOptimizer):
    """Evolved sign momentum (Chen et al. 2023, arXiv 2302.06675, program 1), with decoupled weight decay."""

    def __init__(
        self,
        params: Iterable[torch.Tensor],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    def update(self, weights: list[torch.Tensor], group: dict[str, Any]) -> None:
        """Updates all weights at once."""
        (first, second), rate = group["betas"], group["lr"]
        gradients = [weight.grad for weight in weights]
        momenta = [self._momentum(weight) for weight in weights]
        if group["weight_decay"]:
            private_api.foreach_mul_(weights, 1 - rate * group["weight_decay"])
        private_api.foreach_add_(weights, lion_signs(momenta, gradients, first), alpha=-rate)
        private_api.foreach_mul_(momenta, second)
        private_api.foreach_add_(momenta, gradients, alpha=1 - second)

    def _momentum(self, weight: torch.Tensor) -> torch.Tensor:
        """Momentum of a weight, in its shape; zeros at first."""
        state = self.state[weight]
        if not state:
            state["exp_avg"] = torch.zeros_like(weight)
        momentum: torch.Tensor = state["exp_avg"]
        return momentum


def lion_signs(momenta: list[Any], gradients: list[Any], decay: float) -> list[Any]:
    """Directions of an update: signs of the momenta after one step with `decay`, in their shapes."""
    directions = private_api.foreach_mul(momenta, decay)
    private_api.foreach_add_(directions, gradients, alpha=1 - decay)
    return [direction.sign() for direction in directions]
