"""Cut layers against a loop with the uncut model."""

from __future__ import annotations

from pathlib import Path

import pytest
from examples.by_need.harness import Plain, cells, check, load

import isotrain
from isotrain.core.errors import RunFailedError

EXAMPLE = "cut_layers"


def plain(start: Plain) -> None:
    """SGD with momentum, by hand."""
    import torch

    weights = [variable.value for variable in start.model.trainable_variables]
    velocities = [torch.zeros_like(weight) for weight in weights]
    for inputs, targets in start.batches:
        logits = start.model(inputs, training=True)
        loss = torch.nn.functional.cross_entropy(logits, targets.long())
        gradients = torch.autograd.grad(loss, weights)
        with torch.no_grad():
            for weight, velocity, gradient in zip(weights, velocities, gradients, strict=True):
                velocity.mul_(0.875).sub_(gradient, alpha=0.0625)
                weight.add_(velocity)


@pytest.mark.examples
@cells(EXAMPLE)
def test_equals_the_plain_program(backend: str, replicas: int, tmp_path: Path) -> None:
    check(EXAMPLE, plain, backend, replicas, tmp_path)


@pytest.mark.examples
def test_only_the_last_layer_stays_whole(tmp_path: Path) -> None:
    strategy = {"name": "tensor", "options": {"layers": ["classes"]}}
    spec = load(EXAMPLE).spec.replace(strategy=strategy)
    with pytest.raises(RunFailedError, match=r"can be cut here: up, down, attention, words\."):
        isotrain.run(spec, backend="torch-ddp", replicas=1, output=tmp_path, quiet=True)
