"""SAM against the same in a plain loop."""

from __future__ import annotations

from pathlib import Path

import pytest
from examples.by_need.harness import Plain, cells, check

EXAMPLE = "sam"


def plain(start: Plain) -> None:
    """Two backward passes per step of torch's SGD."""
    import torch

    weights = [variable.value for variable in start.model.trainable_variables]
    optimizer = torch.optim.SGD(weights, lr=0.125, momentum=0.875)
    for inputs, targets in start.batches:
        for is_second in (False, True):
            optimizer.zero_grad()
            logits = start.model(inputs, training=True)
            torch.nn.functional.cross_entropy(logits, targets.long()).backward()
            if not is_second:
                norm = torch.cat([weight.grad.flatten() for weight in weights]).norm()
                moves = [weight.grad * (start.example.RADIUS / norm) for weight in weights]
                sign = 1
            else:
                sign = -1
            with torch.no_grad():
                for weight, move in zip(weights, moves, strict=True):
                    weight.add_(move, alpha=sign)
        optimizer.step()


@pytest.mark.examples
@cells(EXAMPLE)
def test_equals_the_plain_program(backend: str, replicas: int, tmp_path: Path) -> None:
    check(EXAMPLE, plain, backend, replicas, tmp_path)
