"""InfoNCE over the global batch against torch on the whole batch."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from examples.by_need.harness import Plain, cells, check, load

import isotrain

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


@pytest.mark.examples
@pytest.mark.parametrize("backend", ["torch-ddp", "tf-mirrored"])
def test_replicas_matter_no_more_than_bfloat16_itself(backend: str, tmp_path: Path) -> None:
    weights = [
        np.concatenate([each.ravel() for each in result.weights.values()])
        for precision, replicas in (("float32", 1), ("bfloat16", 1), ("bfloat16", 2))
        for spec in [load(EXAMPLE).spec.replace(precision=precision, threads=1)]
        for result in [
            isotrain.run(
                spec,
                backend=backend,
                replicas=replicas,
                output=tmp_path / f"{precision}-{replicas}",
            )
        ]
    ]
    exact, one, two = weights
    noise = np.abs(one - exact).max()
    assert 0 < noise < 0.03
    assert np.abs(two - one).max() < 2 * noise
