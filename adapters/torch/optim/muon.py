"""Muon optimizer for native torch models; torch's own takes matrices alone, and computes in bfloat16."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from isotrain.adapters.common.muon import orthogonalized
from isotrain.adapters.torch.optim.by_group import GroupwiseOptimizer


class Muon(GroupwiseOptimizer):
    """Muon for matrices (Jordan et al. 2024), AdamW for all other weights."""

    def __init__(
        self,
        params: Iterable[torch.Tensor],
        lr: float = 1e-3,
        momentum: float = 0.95,
        nesterov: bool = True,
        orthogonalize: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-7,
        weight_decay: float = 0.0,
    ) -> None:
        options = {
            "lr": lr,
            "momentum": momentum,
            "nesterov": nesterov,
            "orthogonalize": orthogonalize,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
        }
        super().__init__(params, options)

    def update(self, weights: list[torch.Tensor], group: dict[str, Any]) -> None:
        """Updates one weight after the other."""
        for weight in weights:
            self._update(weight, group)

    def _update(self, weight: torch.Tensor, group: dict[str, Any]) -> None:
        """Updates one weight of any shape in place."""
        state = self.state[weight]
        if not state:
            state["step"] = torch.tensor(0.0)
            state["exp_avg"] = torch.zeros_like(weight)
            state["exp_avg_sq"] = torch.zeros_like(weight)
        state["step"] += 1
        rate, mean, gradient = group["lr"], state["exp_avg"], weight.grad
        weight.mul_(1 - rate * group["weight_decay"])
        if is_orthogonalized(weight, group["orthogonalize"]):
            direction = muon_direction(mean, gradient, group["momentum"], group["nesterov"])
            weight.sub_(direction, alpha=rate)
            return
        (first, second), step = group["betas"], state["step"].item()
        mean.lerp_(gradient, 1 - first)
        square = state["exp_avg_sq"].mul_(second).addcmul_(gradient, gradient, value=1 - second)
        scale = (square / (1 - second**step)).sqrt_().add_(group["eps"])
        weight.addcdiv_(mean, scale, value=-rate / (1 - first**step))


def is_orthogonalized(weight: torch.Tensor, orthogonalize: bool) -> bool:
    """Whether Muon updates a weight of this shape, and not AdamW."""
    return orthogonalize and weight.dim() == 2


def muon_direction(
    mean: torch.Tensor, gradient: Any, momentum: float, nesterov: bool
) -> torch.Tensor:
    """Direction to subtract from a matrix, times the rate, in its shape.

    Args:
        mean: Mean of the gradients, in the shape of the matrix; updated in place.
        gradient: Gradient, in the shape of the matrix.
        momentum: Decay of the mean.
        nesterov: Whether the gradient is mixed in once more.
    """
    mean.lerp_(gradient, 1 - momentum)
    ahead = gradient.lerp(mean, momentum) if nesterov else mean
    direction: torch.Tensor = orthogonalized(ahead, torch.t, torch.linalg.norm)
    return direction
