"""LAMB optimizer for native torch models, which torch does not have."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from isotrain.adapters.torch.optim.by_group import GroupwiseOptimizer


class Lamb(GroupwiseOptimizer):
    """Layer-wise adaptive moments (You et al. 2020, arXiv 1904.00962, algorithm 2).

    The trust ratio is |w| / |u| with u the Adam direction plus decoupled weight decay, and 1 where
    either norm is 0.

    Attributes:
        norms: Function that returns the L2 norms (scalars) of tensors, which may be sharded.
    """

    norms: Callable[[Sequence[torch.Tensor]], Sequence[torch.Tensor]]

    def __init__(
        self,
        params: Iterable[torch.Tensor],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-7,
        weight_decay: float = 0.0,
    ) -> None:
        super().__init__(
            params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        )
        self.norms = _norms

    def update(self, weights: list[torch.Tensor], group: dict[str, Any]) -> None:
        """Updates one weight after the other."""
        for weight in weights:
            self._update(weight, group)

    def _update(self, parameter: torch.Tensor, group: dict[str, Any]) -> None:
        """Updates one parameter of any shape in place (You et al. 2020)."""
        state = self.state[parameter]
        if not state:
            state["step"] = torch.tensor(0.0)
            state["exp_avg"] = torch.zeros_like(parameter)
            state["exp_avg_sq"] = torch.zeros_like(parameter)
        state["step"] += 1
        step = state["step"].item()
        first, second = group["betas"]
        mean = state["exp_avg"].lerp_(parameter.grad, 1 - first)
        square = state["exp_avg_sq"].mul_(second)
        square.addcmul_(parameter.grad, parameter.grad, value=1 - second)
        scale = (square / (1 - second**step)).sqrt_().add_(group["eps"])
        direction = (mean / (1 - first**step)) / scale
        direction.add_(parameter, alpha=group["weight_decay"])
        weight_norm, direction_norm = self.norms([parameter, direction])
        ratio = torch.where(
            (weight_norm > 0) & (direction_norm > 0), weight_norm / direction_norm, 1.0
        )
        parameter.sub_(direction * ratio * group["lr"])


def _norms(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """L2 norms, scalars. Collective if the tensors are `DTensor`s."""
    norms = [tensor.norm() for tensor in tensors]
    return [norm.full_tensor() if hasattr(norm, "full_tensor") else norm for norm in norms]
