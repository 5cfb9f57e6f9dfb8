"""Shards of WebDataset, read by one process, against a loop over their batches."""

from __future__ import annotations

from pathlib import Path

import pytest
from examples.by_need.harness import Plain, cells, check

EXAMPLE = "webdataset_shards"


def plain(start: Plain) -> None:
    """torch's SGD on the global batches."""
    import torch

    weights = [variable.value for variable in start.model.trainable_variables]
    optimizer = torch.optim.SGD(weights, lr=0.0625)
    for inputs, targets in start.batches:
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(start.model(inputs), targets).backward()
        optimizer.step()


@pytest.mark.examples
@cells(EXAMPLE)
def test_equals_the_plain_program(backend: str, replicas: int, tmp_path: Path) -> None:
    check(EXAMPLE, plain, backend, replicas, tmp_path)
