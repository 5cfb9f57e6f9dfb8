"""One cycle of rate and momentum against SGD by hand, whose momentum is Keras'."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from examples.by_need.harness import Plain, cells, check

EXAMPLE = "one_cycle"


def plain(start: Plain) -> None:
    """Keras' rule of momentum, with torch's OneCycleLR, of which Keras' optimizers get float32 numbers."""
    import torch

    weights = [variable.value for variable in start.model.trainable_variables]
    momenta = [torch.zeros_like(weight) for weight in weights]
    optimizer = torch.optim.SGD(weights, lr=0.125, momentum=0.9)  # only has the options
    scheduler = torch.optim.lr_scheduler.OneCycleLR(
        optimizer,
        max_lr=0.125,
        total_steps=len(start.batches),
        base_momentum=0.75,
        max_momentum=0.9375,
    )
    for index, (inputs, targets) in enumerate(start.batches):
        loss = torch.nn.functional.mse_loss(start.model(inputs, training=True), targets)
        gradients = torch.autograd.grad(loss, weights)
        options = optimizer.param_groups[0]
        with torch.no_grad():
            for weight, gradient, momentum in zip(weights, gradients, momenta, strict=True):
                momentum.mul_(float(np.float32(options["momentum"]))).sub_(options["lr"] * gradient)
                weight.add_(momentum)
        if index + 1 < len(start.batches):
            optimizer.step()  # of no gradients; the scheduler expects it
            scheduler.step()


@pytest.mark.examples
@cells(EXAMPLE)
def test_equals_the_plain_program(backend: str, replicas: int, tmp_path: Path) -> None:
    check(EXAMPLE, plain, backend, replicas, tmp_path)
