"""A Wasserstein GAN by named updates against a loop with two torch optimizers."""

from __future__ import annotations

from pathlib import Path

import pytest
from examples.by_need.harness import Plain, cells, check

EXAMPLE = "wasserstein_gan"


def plain(start: Plain) -> None:
    """Adam for each model; the generator learns after each five steps of the critic."""
    import torch

    critic, generator = (
        torch.optim.Adam(
            start.model[name].requires_grad_(True).parameters(), 0.001, (0.0, 0.999), 1e-7
        )
        for name in ("critic", "generator")
    )
    for step, batch in enumerate(start.batches):
        critic.zero_grad()
        start.example.critic_loss(start.model, batch).mean().backward()
        critic.step()
        if step % 5 == 4:
            generator.zero_grad()
            start.example.generator_loss(start.model, batch).mean().backward()
            generator.step()


@pytest.mark.examples
@cells(EXAMPLE)
def test_equals_the_plain_program(backend: str, replicas: int, tmp_path: Path) -> None:
    check(EXAMPLE, plain, backend, replicas, tmp_path)
