"""Dropout by sample against one process that computes the masks with NumPy."""

from __future__ import annotations

from pathlib import Path

import pytest
from examples.by_need.harness import Plain, cells, check

from isotrain.testing.checks.random_layers import kept_units

EXAMPLE = "same_dropout"


def plain(start: Plain) -> None:
    """torch's SGD on whole batches, with the masks of each step."""
    import torch

    first, _, second = start.model.layers
    weights = [variable.value for variable in start.model.trainable_variables]
    optimizer = torch.optim.SGD(weights, 0.125)
    for step, (inputs, targets) in enumerate(start.batches):
        mask = torch.from_numpy(kept_units(5, step, len(inputs), 16, 0.25)).double() / 0.75
        optimizer.zero_grad()
        logits = second(first(inputs) * mask)
        torch.nn.functional.cross_entropy(logits, targets).backward()
        optimizer.step()


@pytest.mark.examples
@cells(EXAMPLE)
def test_equals_the_plain_program(backend: str, replicas: int, tmp_path: Path) -> None:
    check(EXAMPLE, plain, backend, replicas, tmp_path)
