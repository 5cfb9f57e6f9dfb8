"""A diffusion model with a moving average against the same in a plain loop."""

from __future__ import annotations

from pathlib import Path

import pytest
from examples.by_need.harness import Plain, cells, check

EXAMPLE = "diffusion"


def plain(start: Plain) -> None:
    """torch's SGD on all samples, and an average from the second step on."""
    import torch

    example, model = start.example, start.model
    weights = [each.value for each in model.trainable_variables]
    optimizer = torch.optim.SGD(weights, lr=0.125)
    average: list[torch.Tensor] = []
    for step in range(example.STEPS):
        if step == 2:
            average = [weight.detach().clone() for weight in weights]
        noisy, noise = map(torch.from_numpy, example.noisy_samples(step))
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(model(noisy), noise).backward()
        optimizer.step()
        with torch.no_grad():
            for mean, weight in zip(average, weights if average else [], strict=True):
                mean.lerp_(weight, 0.125)
    with torch.no_grad():
        for weight, mean in zip(weights, average, strict=True):
            weight.copy_(mean)


@pytest.mark.examples
@cells(EXAMPLE)
def test_equals_the_plain_program(backend: str, replicas: int, tmp_path: Path) -> None:
    check(EXAMPLE, plain, backend, replicas, tmp_path)
