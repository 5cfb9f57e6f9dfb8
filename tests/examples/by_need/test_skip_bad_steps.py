"""Skipped steps against a loop that leaves them out."""

from __future__ import annotations

from pathlib import Path

import pytest
from examples.by_need.harness import Plain, cells, check

EXAMPLE = "skip_bad_steps"


def plain(start: Plain) -> None:
    """torch's SGD, without the steps whose loss is not finite."""
    import torch

    weights = [variable.value for variable in start.model.trainable_variables]
    optimizer = torch.optim.SGD(weights, lr=0.125)
    skipped = 0
    for inputs, targets in start.batches:
        optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(start.model(inputs, training=True), targets)
        if not torch.isfinite(loss):
            skipped += 1
            continue
        loss.backward()
        optimizer.step()
    assert skipped == start.example.spec.epochs


@pytest.mark.examples
@cells(EXAMPLE)
def test_equals_the_plain_program(backend: str, replicas: int, tmp_path: Path) -> None:
    check(EXAMPLE, plain, backend, replicas, tmp_path)
