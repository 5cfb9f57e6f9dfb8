"""A growing batch against a plain loop over the same rows."""

from __future__ import annotations

from pathlib import Path

import pytest
from examples.by_need.harness import Plain, cells, check

EXAMPLE = "growing_batch"


def plain(start: Plain) -> None:
    """torch's SGD, whose rate is set before each step."""
    import torch

    features, targets = map(torch.tensor, start.example.samples())
    weights = [variable.value for variable in start.model.trainable_variables]
    optimizer = torch.optim.SGD(weights, lr=0.0625)
    for rows in start.example.batches():
        optimizer.param_groups[0]["lr"] = start.example.rate(rows)
        optimizer.zero_grad()
        outputs = start.model(features[rows], training=True)
        torch.nn.functional.mse_loss(outputs, targets[rows]).backward()
        optimizer.step()


@pytest.mark.examples
@cells(EXAMPLE)
def test_equals_the_plain_program(backend: str, replicas: int, tmp_path: Path) -> None:
    check(EXAMPLE, plain, backend, replicas, tmp_path)
