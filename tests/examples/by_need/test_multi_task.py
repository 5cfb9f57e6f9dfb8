"""Named losses against a loop that adds them."""

from __future__ import annotations

from pathlib import Path

import pytest
from examples.by_need.harness import Plain, cells, check

EXAMPLE = "multi_task"


def plain(start: Plain) -> None:
    """The mean over priced samples, and half the cross-entropy."""
    import torch

    weights = [variable.value for variable in start.model.trainable_variables]
    optimizer = torch.optim.SGD(weights, lr=0.0625)
    for inputs, targets in start.batches:
        optimizer.zero_grad()
        price, logits = start.model(inputs)
        errors, priced = (price[:, 0] - targets["price"]) ** 2, targets["priced"]
        kind = torch.nn.functional.cross_entropy(logits, targets["kind"].long())
        ((errors * priced).sum() / priced.sum() + 0.5 * kind).backward()
        optimizer.step()


@pytest.mark.examples
@cells(EXAMPLE)
def test_equals_the_plain_program(backend: str, replicas: int, tmp_path: Path) -> None:
    check(EXAMPLE, plain, backend, replicas, tmp_path)
