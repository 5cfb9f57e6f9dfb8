"""An actor and a critic against a plain loop: updates, clipping, a moving average, values, own batches."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from examples.by_need.harness import Plain, cells, check

PROGRAM = "../../tests/examples/programs/actor_critic"


def plain(start: Plain) -> None:
    """SGD with momentum by hand: torch's clipping adds 1e-6 to the norm."""
    import torch

    model, sizes = start.model, start.example.SIZES
    value, policy = (
        [variable.value.requires_grad_(True) for variable in part.trainable_variables]
        for part in (model.value, model.policy)
    )
    weights = [*policy, *value]
    momenta = {id(weight): torch.zeros_like(weight) for weight in weights}
    averages = [weight.detach().clone() for weight in weights]

    def update(loss: Any, trained: list[Any], rate: float, momentum: float, bound: float) -> None:
        gradients = torch.autograd.grad(loss, trained)
        norm = torch.sqrt(sum((gradient**2).sum() for gradient in gradients))
        factor = bound / max(norm, bound)
        with torch.no_grad():
            for weight, gradient in zip(trained, gradients, strict=True):
                buffer = momenta[id(weight)]
                buffer.mul_(momentum).add_(factor * gradient)
                weight.sub_(rate * buffer)

    for step in range(len(sizes)):
        states, actions, returns = map(torch.as_tensor, start.example.rows(step))
        update(((model.value(states)[:, 0] - returns) ** 2).mean(), value, 0.125, 0.5, 0.25)
        advantages = (returns - model.value(states)[:, 0]).detach()
        logs = torch.log_softmax(model.policy(states), -1)
        chosen = logs[torch.arange(len(logs)), actions] * (advantages - advantages.mean())
        entropies = -(logs.exp() * logs).sum(-1)
        update((-chosen - 0.125 / 2**step * entropies).mean(), policy, 0.25, 0.75, 0.125)
        for average, weight in zip(averages, weights, strict=True):
            average.lerp_(weight.detach(), 0.25)
    with torch.no_grad():
        for average, weight in zip(averages, weights, strict=True):
            weight.copy_(average)


@pytest.mark.examples
@cells(PROGRAM)
def test_equals_the_plain_program(backend: str, replicas: int, tmp_path: Path) -> None:
    check(PROGRAM, plain, backend, replicas, tmp_path)
