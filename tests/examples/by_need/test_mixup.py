"""Mixup by partners against a loop over mixed batches."""

from __future__ import annotations

from pathlib import Path

import pytest
from examples.by_need.harness import Plain, cells, check

EXAMPLE = "mixup"
TOLERANCE = 1e-9
"""Mixed float32 targets sum to 1 with an error of 1e-8, and TensorFlow's kernel takes the sum for 1."""


def plain(start: Plain) -> None:
    """torch's SGD on soft targets."""
    import torch

    weights = [variable.value for variable in start.model.trainable_variables]
    optimizer = torch.optim.SGD(weights, lr=0.125)
    for inputs, targets in start.batches:
        optimizer.zero_grad()
        outputs = start.model(inputs, training=True)
        torch.nn.functional.cross_entropy(outputs, targets).backward()
        optimizer.step()


@pytest.mark.examples
@cells(EXAMPLE)
def test_equals_the_plain_program(backend: str, replicas: int, tmp_path: Path) -> None:
    check(EXAMPLE, plain, backend, replicas, tmp_path, tolerance=TOLERANCE)
