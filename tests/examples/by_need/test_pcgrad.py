"""PCGrad against the same in a plain loop."""

from __future__ import annotations

from pathlib import Path

import pytest
from examples.by_need.harness import Plain, cells, check

EXAMPLE = "pcgrad"


def plain(start: Plain) -> None:
    """Projects each task's gradient, as one vector, where the two point against each other."""
    import torch

    weights = [variable.value for variable in start.model.trainable_variables]
    for inputs, targets in start.batches:
        errors = (start.model(inputs, training=True) - targets) ** 2
        first, second = (
            torch.cat(
                [each.flatten() for each in torch.autograd.grad(mean, weights, retain_graph=True)]
            )
            for mean in errors.mean(dim=0)
        )
        total = first + second
        if (product := first @ second) < 0:
            total = total - product / (second @ second) * second - product / (first @ first) * first
        with torch.no_grad():
            parts = total.split([weight.numel() for weight in weights])
            for weight, part in zip(weights, parts, strict=True):
                weight -= 0.125 * part.reshape(weight.shape)


@pytest.mark.examples
@cells(EXAMPLE)
def test_equals_the_plain_program(backend: str, replicas: int, tmp_path: Path) -> None:
    check(EXAMPLE, plain, backend, replicas, tmp_path)
