"""A penalty on gradients against a loop with torch.autograd.grad."""

from __future__ import annotations

from pathlib import Path

import pytest
from examples.by_need.harness import Plain, cells, check

EXAMPLE = "gradient_penalty"


def plain(start: Plain) -> None:
    """Squared errors and torch's own gradients."""
    import torch

    weights = [variable.value for variable in start.model.trainable_variables]
    optimizer = torch.optim.SGD(weights, lr=0.03125)
    for inputs, targets in start.batches:
        optimizer.zero_grad()
        points = inputs.detach().requires_grad_()
        outputs = start.model(points)
        (gradient,) = torch.autograd.grad(outputs.sum(), points, create_graph=True)
        errors = ((outputs - targets) ** 2).sum(-1)
        penalty = (gradient.pow(2).sum(-1).sqrt() - 1) ** 2
        (errors + start.example.PENALTY * penalty).mean().backward()
        optimizer.step()


@pytest.mark.examples
@cells(EXAMPLE)
def test_equals_the_plain_program(backend: str, replicas: int, tmp_path: Path) -> None:
    check(EXAMPLE, plain, backend, replicas, tmp_path)
