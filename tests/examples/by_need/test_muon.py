"""Muon and AdamW against the same Keras optimizer in a plain loop."""

from __future__ import annotations

from pathlib import Path

import pytest
from examples.by_need.harness import Plain, cells, check

EXAMPLE = "muon"


def plain(start: Plain) -> None:
    """Keras' Muon, with the same names."""
    import torch

    variables = start.model.trainable_variables
    optimizer = start.example.muon(0.0625, [variable.path for variable in variables])
    for inputs, targets in start.batches:
        logits = start.model(inputs, training=True)
        loss = torch.nn.functional.cross_entropy(logits, targets.long())
        gradients = torch.autograd.grad(loss, [variable.value for variable in variables])
        with torch.no_grad():
            optimizer.apply(list(gradients), variables)


@pytest.mark.examples
@cells(EXAMPLE)
def test_equals_the_plain_program(backend: str, replicas: int, tmp_path: Path) -> None:
    """In float32 Keras computes the scale of Muon's updates."""
    check(EXAMPLE, plain, backend, replicas, tmp_path, tolerance=1e-6)
