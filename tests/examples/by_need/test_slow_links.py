"""DiLoCo against the same in a plain loop, which trains the replicas in turn."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest
from examples.by_need.harness import Plain, cells, check

EXAMPLE = "slow_links"


def plain(start: Plain, *, replicas: int) -> None:
    """SGD on the slices of each replica; then Nesterov momentum on the mean change of their weights."""
    import torch

    weights = [variable.value for variable in start.model.trainable_variables]
    outer = [weight.detach().clone() for weight in weights]
    momenta = [torch.zeros_like(weight) for weight in weights]
    inner = [[torch.zeros_like(weight) for weight in weights] for _ in range(replicas)]
    local = [[weight.clone() for weight in outer] for _ in range(replicas)]
    for step, (inputs, targets) in enumerate(start.batches, 1):
        rows = len(targets) // replicas
        for replica, (values, velocities) in enumerate(zip(local, inner, strict=True)):
            part = slice(replica * rows, (replica + 1) * rows)
            with torch.no_grad():
                for weight, value in zip(weights, values, strict=True):
                    weight.copy_(value)
                    weight.grad = None
            logits = start.model(inputs[part], training=True)
            torch.nn.functional.cross_entropy(logits, targets[part].long()).backward()
            for weight, value, velocity in zip(weights, values, velocities, strict=True):
                velocity.mul_(0.875).add_(weight.grad)
                value.sub_(velocity, alpha=0.125)
        if step % start.example.EVERY == 0 or step == len(start.batches):
            for index, (value, momentum) in enumerate(zip(outer, momenta, strict=True)):
                gradient = value - sum(values[index] for values in local) / replicas
                momentum.mul_(0.875).add_(gradient)
                value.sub_(gradient + 0.875 * momentum, alpha=0.75)
            local = [[weight.clone() for weight in outer] for _ in range(replicas)]
    with torch.no_grad():
        for weight, value in zip(weights, outer, strict=True):
            weight.copy_(value)


@pytest.mark.examples
@cells(EXAMPLE)
def test_equals_the_plain_program(backend: str, replicas: int, tmp_path: Path) -> None:
    twin = functools.partial(plain, replicas=replicas)
    check(EXAMPLE, twin, backend, replicas, tmp_path)
