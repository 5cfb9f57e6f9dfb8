"""Stochastic weight averaging against the mean by hand."""

from __future__ import annotations

from pathlib import Path

import pytest
from examples.by_need.harness import Plain, cells, check

EXAMPLE = "stochastic_weight_averaging"


def plain(start: Plain) -> None:
    """torch's SGD, and the sum of the weights after three epochs."""
    import torch

    weights = [variable.value for variable in start.model.trainable_variables]
    optimizer = torch.optim.SGD(weights, lr=0.125, momentum=0.875)
    average = [torch.zeros_like(weight) for weight in weights]
    for step, (inputs, targets) in enumerate(start.batches, 1):
        optimizer.zero_grad()
        logits = start.model(inputs, training=True)
        torch.nn.functional.cross_entropy(logits, targets.long()).backward()
        optimizer.step()
        if step in (6, 9, 12):
            for mean, weight in zip(average, weights, strict=True):
                mean += weight.detach() / 3
    with torch.no_grad():
        for weight, mean in zip(weights, average, strict=True):
            weight.copy_(mean)


@pytest.mark.examples
@cells(EXAMPLE)
def test_equals_the_plain_program(backend: str, replicas: int, tmp_path: Path) -> None:
    check(EXAMPLE, plain, backend, replicas, tmp_path)
