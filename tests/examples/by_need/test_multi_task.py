"""Losses of two tasks against torch, one of them over some of the samples."""

from __future__ import annotations

from pathlib import Path

import pytest
from examples.by_need.harness import Plain, cells, check

EXAMPLE = "multi_task"


def plain(start: Plain) -> None:
    """The sum of both losses, and SGD."""
    import torch

    weights = [variable.value for variable in start.model.trainable_variables]
    optimizer = torch.optim.SGD(weights, lr=0.03125)
    for features, targets in start.batches:
        optimizer.zero_grad()
        outputs = start.model(features, training=True)
        kind = torch.nn.functional.cross_entropy(outputs["kind"], targets["kind"].long())
        known = targets["known"] > 0
        size = ((outputs["size"] - targets["size"])[known] ** 2).mean()
        (kind + size).backward()
        optimizer.step()


@pytest.mark.examples
@cells(EXAMPLE)
def test_equals_the_plain_program(backend: str, replicas: int, tmp_path: Path) -> None:
    check(EXAMPLE, plain, backend, replicas, tmp_path)
