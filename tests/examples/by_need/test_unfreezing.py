"""Unfreezing by two updates against a loop that builds a new optimizer on the way."""

from __future__ import annotations

from pathlib import Path

import pytest
from examples.by_need.harness import Plain, cells, check

EXAMPLE = "unfreezing"


def plain(start: Plain) -> None:
    """torch's SGD of the head, and of all weights from the second epoch on."""
    import torch

    def weights(*layers: str) -> list[torch.Tensor]:
        variables = [v for name in layers for v in start.model.get_layer(name).trainable_variables]
        return [variable.value.requires_grad_(True) for variable in variables]

    optimizer = torch.optim.SGD(weights("head"), lr=0.5, momentum=0.5)
    for step, (inputs, targets) in enumerate(start.batches):
        if step == len(start.batches) // 3:
            optimizer = torch.optim.SGD(weights("backbone", "head"), lr=0.125, momentum=0.75)
        optimizer.zero_grad()
        outputs = start.model(inputs, training=True)
        torch.nn.functional.cross_entropy(outputs, targets.long()).backward()
        optimizer.step()


@pytest.mark.examples
@cells(EXAMPLE)
def test_equals_the_plain_program(backend: str, replicas: int, tmp_path: Path) -> None:
    check(EXAMPLE, plain, backend, replicas, tmp_path)
