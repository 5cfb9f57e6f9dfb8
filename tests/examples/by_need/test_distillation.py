"""Distillation against torch, with a teacher that the twin computes from its weights."""

from __future__ import annotations

from pathlib import Path

import pytest
from examples.by_need.harness import Plain, cells, check

EXAMPLE = "distillation"


def plain(start: Plain) -> None:
    """Cross-entropy of hard and soft labels, and SGD."""
    import torch

    from isotrain.adapters.keras.model import seeded_initial_weights

    with seeded_initial_weights(0):
        teacher = start.example.teacher()
    entropy, temperature = torch.nn.functional.cross_entropy, start.example.TEMPERATURE
    weights = [variable.value for variable in start.model.trainable_variables]
    optimizer = torch.optim.SGD(weights, lr=0.125)
    for inputs, labels in start.batches:
        optimizer.zero_grad()
        logits = start.model(inputs, training=True)
        soft_labels = (teacher(inputs, training=False) / temperature).softmax(-1).detach()
        soft = entropy(logits / temperature, soft_labels) * temperature**2
        (entropy(logits, labels.long()) + soft).backward()
        optimizer.step()


@pytest.mark.examples
@cells(EXAMPLE)
def test_equals_the_plain_program(backend: str, replicas: int, tmp_path: Path) -> None:
    check(EXAMPLE, plain, backend, replicas, tmp_path)
