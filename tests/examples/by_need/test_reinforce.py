"""REINFORCE against the same in a plain loop."""

from __future__ import annotations

from pathlib import Path

import pytest
from examples.by_need.harness import Plain, cells, check

EXAMPLE = "reinforce"


def plain(start: Plain) -> None:
    """All episodes in one process, and torch's SGD."""
    import torch

    example, model = start.example, start.model
    optimizer = torch.optim.SGD([each.value for each in model.trainable_variables], lr=0.125)
    for step in range(example.STEPS):
        states, actions, returns = example.play(
            lambda state: model(torch.from_numpy(state)).detach().numpy(),
            step,
            range(example.EPISODES),
        )
        log_probabilities = model(torch.from_numpy(states)).log_softmax(-1)
        chosen = log_probabilities[torch.arange(len(actions)), torch.from_numpy(actions)]
        optimizer.zero_grad()
        (-chosen * torch.from_numpy(returns)).mean().backward()
        optimizer.step()


@pytest.mark.examples
@cells(EXAMPLE)
def test_equals_the_plain_program(backend: str, replicas: int, tmp_path: Path) -> None:
    check(EXAMPLE, plain, backend, replicas, tmp_path)
