"""A GAN by named updates against a loop with two torch optimizers."""

from __future__ import annotations

from pathlib import Path

import pytest
from examples.by_need.harness import Plain, cells, check

EXAMPLE = "gan"


def plain(start: Plain) -> None:
    """Two optimizers, each of which steps the weights of one model."""
    import torch

    weights = {
        name: [variable.value.requires_grad_(True) for variable in model.trainable_variables]
        for name, model in start.model.items()
    }
    discriminators = torch.optim.SGD(weights["discriminator"], lr=0.0625)
    generators = torch.optim.SGD(weights["generator"], lr=0.125, momentum=0.5)
    for batch in start.batches:
        discriminators.zero_grad()
        start.example.discriminator_loss(start.model, batch).mean().backward()
        discriminators.step()
        generators.zero_grad()
        start.example.generator_loss(start.model, batch).mean().backward()
        generators.step()


@pytest.mark.examples
@cells(EXAMPLE)
def test_equals_the_plain_program(backend: str, replicas: int, tmp_path: Path) -> None:
    check(EXAMPLE, plain, backend, replicas, tmp_path)
