"""Token-weighted means against torch's mean over all tokens of the batch."""

from __future__ import annotations

from pathlib import Path

import pytest
from examples.by_need.harness import Plain, cells, check

EXAMPLE = "token_weights"


def plain(start: Plain) -> None:
    """Cross-entropy that ignores padding, and SGD."""
    import torch

    weights = [variable.value for variable in start.model.trainable_variables]
    optimizer = torch.optim.SGD(weights, lr=0.5)
    for texts, targets in start.batches:
        optimizer.zero_grad()
        logits = start.model(texts, training=True).flatten(0, 1)
        loss = torch.nn.functional.cross_entropy(logits, targets.flatten().long(), ignore_index=0)
        loss.backward()
        optimizer.step()


@pytest.mark.examples
@cells(EXAMPLE)
def test_equals_the_plain_program(backend: str, replicas: int, tmp_path: Path) -> None:
    check(EXAMPLE, plain, backend, replicas, tmp_path)
