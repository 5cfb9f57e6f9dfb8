"""Second derivatives by the inputs against torch.autograd."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from examples.by_need.harness import Plain, cells, check

EXAMPLE = "physics_informed"


def plain(start: Plain) -> None:
    """Residuals by autograd with `create_graph`, and SGD."""
    import torch

    def gradient(y: Any, x: Any) -> Any:
        return torch.autograd.grad(y.sum(), x, create_graph=True)[0]

    weights = [variable.value for variable in start.model.trainable_variables]
    optimizer = torch.optim.SGD(weights, lr=0.03125)
    for times, _ in start.batches:
        optimizer.zero_grad()
        times = times.clone().requires_grad_()
        origin = torch.zeros_like(times).requires_grad_()
        position, first = start.model(times, training=True), start.model(origin, training=True)
        residual = gradient(gradient(position, times), times) + position
        initial = (first - 1) ** 2 + gradient(first, origin) ** 2
        (residual**2 + initial).mean().backward()
        optimizer.step()


@pytest.mark.examples
@cells(EXAMPLE)
def test_equals_the_plain_program(backend: str, replicas: int, tmp_path: Path) -> None:
    check(EXAMPLE, plain, backend, replicas, tmp_path)
