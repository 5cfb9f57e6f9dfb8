"""MAML against a loop over tasks with torch.func."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from examples.by_need.harness import Plain, cells, check

EXAMPLE = "maml"


def plain(start: Plain) -> None:
    """One task after the other, with weights adapted by torch.autograd.grad."""
    import torch

    weights = [variable.value for variable in start.model.trainable_variables]
    optimizer = torch.optim.SGD(weights, lr=0.125)
    for inputs, targets in start.batches:
        optimizer.zero_grad()
        losses = []
        for points, values in zip(inputs, targets, strict=True):

            def loss(w: list[Any], part: slice, x: Any = points, y: Any = values) -> Any:
                hidden = torch.tanh(x[part] @ w[0] + w[1])
                return ((hidden @ w[2] + w[3] - y[part]) ** 2).mean()

            shots = start.example.SHOTS
            first = loss(weights, slice(None, shots))
            gradients = torch.autograd.grad(first, weights, create_graph=True)
            rate = start.example.ADAPTATION_RATE
            adapted = [w - rate * g for w, g in zip(weights, gradients, strict=True)]
            losses.append(loss(adapted, slice(shots, None)))
        torch.stack(losses).mean().backward()
        optimizer.step()


@pytest.mark.examples
@cells(EXAMPLE)
def test_equals_the_plain_program(backend: str, replicas: int, tmp_path: Path) -> None:
    check(EXAMPLE, plain, backend, replicas, tmp_path)
