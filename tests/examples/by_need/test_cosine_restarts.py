"""Cosine restarts against torch's scheduler."""

from __future__ import annotations

from pathlib import Path

import pytest
from examples.by_need.harness import Plain, cells, check

EXAMPLE = "cosine_restarts"


def plain(start: Plain) -> None:
    """Keras' rule of momentum, with torch's CosineAnnealingWarmRestarts."""
    import torch

    weights = [variable.value for variable in start.model.trainable_variables]
    momenta = [torch.zeros_like(weight) for weight in weights]
    optimizer = torch.optim.SGD(weights, lr=0.125)  # only has the rate
    scheduler = torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(
        optimizer, T_0=3, T_mult=2, eta_min=0.125 / 8
    )
    for inputs, targets in start.batches:
        loss = torch.nn.functional.mse_loss(start.model(inputs, training=True), targets)
        gradients = torch.autograd.grad(loss, weights)
        rate = optimizer.param_groups[0]["lr"]
        with torch.no_grad():
            for weight, gradient, momentum in zip(weights, gradients, momenta, strict=True):
                momentum.mul_(0.875).sub_(rate * gradient)
                weight.add_(momentum)
        optimizer.step()  # of no gradients; the scheduler expects it
        scheduler.step()


@pytest.mark.examples
@cells(EXAMPLE)
def test_equals_the_plain_program(backend: str, replicas: int, tmp_path: Path) -> None:
    check(EXAMPLE, plain, backend, replicas, tmp_path)
