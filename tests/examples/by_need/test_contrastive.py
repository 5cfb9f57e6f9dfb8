"""InfoNCE over the global batch against torch on the whole batch."""

from __future__ import annotations

from pathlib import Path

import pytest
from examples.by_need.harness import Plain, cells, check

EXAMPLE = "contrastive"


def plain(start: Plain) -> None:
    """Cross-entropy of all pairs, and SGD by hand."""
    import torch

    weights = [variable.value for variable in start.model.trainable_variables]
    optimizer = torch.optim.SGD(weights, lr=0.5)
    for batch in start.batches:
        optimizer.zero_grad()
        first, second = (start.model(view, training=True) for view in batch)
        logits = first @ second.T / start.example.TEMPERATURE
        labels = torch.arange(len(logits))
        entropy = torch.nn.functional.cross_entropy
        ((entropy(logits, labels) + entropy(logits.T, labels)) / 2).backward()
        optimizer.step()


@pytest.mark.examples
@cells(EXAMPLE)
def test_equals_the_plain_program(backend: str, replicas: int, tmp_path: Path) -> None:
    check(EXAMPLE, plain, backend, replicas, tmp_path)
