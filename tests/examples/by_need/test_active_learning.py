"""Active learning against the same in a plain loop."""

from __future__ import annotations

from pathlib import Path

import pytest
from examples.by_need.harness import Plain, cells, check

EXAMPLE = "active_learning"


def plain(start: Plain) -> None:
    """The whole labeled set as one batch, and torch's SGD."""
    import torch

    example, model = start.example, start.model
    points, labels = map(torch.from_numpy, example.pool())
    optimizer = torch.optim.SGD([each.value for each in model.trainable_variables], lr=0.125)
    labeled: list[int] = []
    for _ in range(example.ROUNDS):
        labeled += example.least_sure(model(points).detach().numpy(), labeled)
        for _ in range(example.STEPS_PER_ROUND):
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(points[labeled]), labels[labeled]).backward()
            optimizer.step()


@pytest.mark.examples
@cells(EXAMPLE)
def test_equals_the_plain_program(backend: str, replicas: int, tmp_path: Path) -> None:
    check(EXAMPLE, plain, backend, replicas, tmp_path)
