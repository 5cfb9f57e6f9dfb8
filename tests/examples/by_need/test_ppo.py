"""PPO against the same in a plain loop."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from examples.by_need.harness import Plain, cells, check

EXAMPLE = "ppo"


def plain(start: Plain) -> None:
    """All episodes in one process, and torch's SGD."""
    import torch

    example, model = start.example, start.model

    def ask(states: np.ndarray) -> np.ndarray:
        logits: np.ndarray = model(torch.from_numpy(states)).detach().numpy()
        return logits

    optimizer = torch.optim.SGD([each.value for each in model.trainable_variables], lr=0.125)
    for step in range(0, example.STEPS * example.PASSES, example.PASSES):
        states, actions, returns = example.play(ask, step, range(example.EPISODES))
        old = torch.from_numpy(example.log_probability(ask(states), actions))
        advantages = torch.from_numpy(returns - example.LENGTH / 4)
        for _ in range(example.PASSES):
            log_probabilities = model(torch.from_numpy(states)).log_softmax(-1)
            chosen = log_probabilities[torch.arange(len(actions)), torch.from_numpy(actions)]
            ratio = (chosen - old).exp()
            clipped = ratio.clamp(1 - example.CLIP, 1 + example.CLIP)
            optimizer.zero_grad()
            (-torch.minimum(ratio * advantages, clipped * advantages)).mean().backward()
            optimizer.step()


@pytest.mark.examples
@cells(EXAMPLE)
def test_equals_the_plain_program(backend: str, replicas: int, tmp_path: Path) -> None:
    check(EXAMPLE, plain, backend, replicas, tmp_path)
