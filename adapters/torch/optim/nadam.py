"""NAdam optimizer for native torch models, without the state that follows from the number of steps."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from isotrain.adapters.common.adam_variants import PRODUCT_STEPS, nadam_momentum_product


class Nadam(torch.optim.NAdam):
    """torch's NAdam with decoupled weight decay; checkpoints of other frameworks lack its `mu_product`."""

    def __init__(self, params: Iterable[torch.Tensor], **options: Any) -> None:
        super().__init__(params, decoupled_weight_decay=True, **options)
        self.register_step_pre_hook(_compute_products)


def _compute_products(optimizer: torch.optim.Optimizer, *arguments: Any) -> None:
    """Computes the products of momenta that are 0, as created for a state that is read."""
    for group in optimizer.param_groups:
        for weight in group["params"]:
            state = optimizer.state.get(weight)
            if state and state["step"] < PRODUCT_STEPS and not state["mu_product"]:
                steps = int(state["step"].item())
                state["mu_product"].fill_(nadam_momentum_product(group["betas"][0], steps))
