"""Cut layers against a loop with the uncut model."""

from __future__ import annotations

from pathlib import Path

import pytest
from examples.by_need.harness import Plain, cells, check, load

import isotrain

EXAMPLE = "cut_layers"


def plain(start: Plain) -> None:
    """SGD with momentum, by hand."""
    import torch

    weights = [variable.value for variable in start.model.trainable_variables]
    velocities = [torch.zeros_like(weight) for weight in weights]
    for inputs, targets in start.batches:
        logits = start.model(inputs, training=True)
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten().long())
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
def test_no_process_has_all_logits(tmp_path: Path) -> None:
    (notes, _) = isotrain.launch(notes_of, load(EXAMPLE).spec, backend="torch-ddp", output=tmp_path)
    assert len(notes) == 4
    assert sum("for the loss, in place of 16 logits" in note for note in notes) == 1


def notes_of(session: isotrain.Session) -> list[str]:
    return [each for each in session.setup_notes() if each.startswith("tensor: ")]
