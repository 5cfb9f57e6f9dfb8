"""A VAE with an annealed KL term against torch."""

from __future__ import annotations

from pathlib import Path

import pytest
from examples.by_need.harness import Plain, cells, check

EXAMPLE = "annealed_vae"


def plain(start: Plain) -> None:
    """The evidence bound with beta rising over 8 steps."""
    import torch

    weights = [variable.value for variable in start.model.trainable_variables]
    optimizer = torch.optim.SGD(weights, lr=0.03125)
    for index, (inputs, noise) in enumerate(start.batches):
        optimizer.zero_grad()
        reconstruction, mean, log_variance = start.model([inputs, noise], training=True)
        divergence = (mean**2 + log_variance.exp() - 1 - log_variance).sum(-1) / 2
        error = ((reconstruction - inputs) ** 2).sum(-1)
        (error + min(1.0, index / 8) * divergence).mean().backward()
        optimizer.step()


@pytest.mark.examples
@cells(EXAMPLE)
def test_equals_the_plain_program(backend: str, replicas: int, tmp_path: Path) -> None:
    check(EXAMPLE, plain, backend, replicas, tmp_path)
