"""Images that workers make, against a loop over these batches."""

from __future__ import annotations

from pathlib import Path

import pytest
from examples.by_need.harness import Plain, cells, check

EXAMPLE = "image_workers"


def plain(start: Plain) -> None:
    """torch's SGD."""
    import torch

    weights = [variable.value for variable in start.model.trainable_variables]
    optimizer = torch.optim.SGD(weights, lr=0.125)
    for inputs, targets in start.batches:
        optimizer.zero_grad()
        outputs = start.model(inputs, training=True)
        torch.nn.functional.cross_entropy(outputs, targets.long()).backward()
        optimizer.step()


@pytest.mark.examples
@cells(EXAMPLE)
def test_equals_the_plain_program(backend: str, replicas: int, tmp_path: Path) -> None:
    check(EXAMPLE, plain, backend, replicas, tmp_path)
