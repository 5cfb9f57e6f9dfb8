"""Adaptive gradient clipping against the same in a plain loop, with clipping by the global norm after it."""

from __future__ import annotations

from pathlib import Path

import pytest
from examples.by_need.harness import Plain, cells, check

EXAMPLE = "gradient_surgery"


def plain(start: Plain) -> None:
    """torch's SGD on clipped gradients."""
    import torch

    weights = [variable.value for variable in start.model.trainable_variables]
    optimizer = torch.optim.SGD(weights, lr=0.25, momentum=0.875)
    for inputs, targets in start.batches:
        optimizer.zero_grad()
        logits = start.model(inputs, training=True)
        torch.nn.functional.cross_entropy(logits, targets.long()).backward()
        for weight in weights:
            if weight.dim() == 2:
                bound = 0.125 * weight.detach().norm(dim=0).clamp(min=1e-3)
                weight.grad *= (bound / weight.grad.norm(dim=0).clamp(min=1e-6)).clamp(max=1.0)
        norm = torch.cat([weight.grad.flatten() for weight in weights]).norm()
        for weight in weights:
            weight.grad *= min(1.0, 0.25 / norm)
        optimizer.step()


@pytest.mark.examples
@cells(EXAMPLE)
def test_equals_the_plain_program(backend: str, replicas: int, tmp_path: Path) -> None:
    check(EXAMPLE, plain, backend, replicas, tmp_path)
