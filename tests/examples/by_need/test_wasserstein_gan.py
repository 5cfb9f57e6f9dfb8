"""A Wasserstein GAN by named updates against a loop with two optimizers."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from examples.by_need.harness import Plain, cells, check

EXAMPLE = "wasserstein_gan"


def gradient(f: Any, x: Any) -> Any:
    """Gradient of the sum of `f(x)` by `x`, which can be differentiated again."""
    import torch

    x.requires_grad_()
    return torch.autograd.grad(f(x).sum(), x, create_graph=True)[0]


def plain(start: Plain) -> None:
    """Adam for each model; the generator learns after each five steps of the critic."""
    import keras
    import torch

    critic, generator = start.model["critic"], start.model["generator"]
    adam = {
        model: keras.optimizers.Adam(0.0009765625, beta_1=0.0, beta_2=0.875)
        for model in (critic, generator)
    }

    def update(model: Any, losses: Any) -> None:
        weights = [variable.value for variable in model.trainable_variables]
        gradients = torch.autograd.grad(losses.mean(), weights)
        with torch.no_grad():
            adam[model].apply(gradients, model.trainable_variables)

    for variable in critic.trainable_variables + generator.trainable_variables:
        variable.value.requires_grad_(True)
    step = SimpleNamespace(gradient=gradient)
    for index, batch in enumerate(start.batches):
        update(critic, start.example.critic_loss(start.model, batch, step))
        if index % 5 == 4:
            update(generator, start.example.generator_loss(start.model, batch))


@pytest.mark.examples
@cells(EXAMPLE)
def test_equals_the_plain_program(backend: str, replicas: int, tmp_path: Path) -> None:
    check(EXAMPLE, plain, backend, replicas, tmp_path)
