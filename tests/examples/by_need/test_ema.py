"""Exponential moving average of the weights against the same with `torch._foreach_lerp_`, as timm has it."""

from __future__ import annotations

from pathlib import Path

import pytest
from examples.by_need.harness import Plain, cells, check

EXAMPLE = "ema"


def plain(start: Plain) -> None:
    """torch's SGD, and a lerp after each step."""
    import torch

    weights = [variable.value for variable in start.model.trainable_variables]
    optimizer = torch.optim.SGD(weights, lr=0.125, momentum=0.875)
    average = [weight.detach().clone() for weight in weights]
    for inputs, targets in start.batches:
        optimizer.zero_grad()
        logits = start.model(inputs, training=True)
        torch.nn.functional.cross_entropy(logits, targets.long()).backward()
        optimizer.step()
        with torch.no_grad():
            for mean, weight in zip(average, weights, strict=True):
                mean.lerp_(weight, (1 - 0.9375))
    with torch.no_grad():
        for weight, mean in zip(weights, average, strict=True):
            weight.copy_(mean)


@pytest.mark.examples
@cells(EXAMPLE)
def test_equals_the_plain_program(backend: str, replicas: int, tmp_path: Path) -> None:
    check(EXAMPLE, plain, backend, replicas, tmp_path)
