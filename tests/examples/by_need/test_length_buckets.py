"""Batches of similar lengths against a loop with torch's ignore_index."""

from __future__ import annotations

from pathlib import Path

import pytest
from examples.by_need.harness import Plain, cells, check

EXAMPLE = "length_buckets"


def plain(start: Plain) -> None:
    """torch's SGD on the mean over real tokens."""
    import torch

    weights = [variable.value for variable in start.model.trainable_variables]
    optimizer = torch.optim.SGD(weights, lr=0.125)
    for inputs, targets in start.batches:
        optimizer.zero_grad()
        outputs = start.model(inputs, training=True)
        logits, tokens = outputs.flatten(0, 1), targets.flatten().long()
        torch.nn.functional.cross_entropy(logits, tokens, ignore_index=-1).backward()
        optimizer.step()


@pytest.mark.examples
@cells(EXAMPLE)
def test_equals_the_plain_program(backend: str, replicas: int, tmp_path: Path) -> None:
    check(EXAMPLE, plain, backend, replicas, tmp_path)
