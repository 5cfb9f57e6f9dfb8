"""Momentum contrast against two plain encoders and a tensor of keys."""

from __future__ import annotations

from pathlib import Path

import pytest
from examples.by_need.harness import Plain, cells, check

EXAMPLE = "moco"


def plain(start: Plain) -> None:
    """torch's SGD on the encoder of queries; that of keys follows it."""
    import torch

    example, encoder = start.example, start.model
    weights = [each.value for each in encoder.trainable_variables]
    slow = [weight.detach().clone() for weight in weights]
    queue = encoder.get_layer("queue").keys.value.clone()
    optimizer = torch.optim.SGD(weights, lr=0.125)
    for step in range(example.STEPS):
        first, second = torch.from_numpy(example.views(step))
        keys = encoder.stateless_call(slow, encoder.non_trainable_variables, second)[0].detach()
        queries = encoder(first)
        logits = torch.cat([(queries * keys).sum(-1, keepdim=True), queries @ queue.T], -1)
        labels = torch.zeros(len(logits), dtype=torch.long)
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(logits / example.TEMPERATURE, labels).backward()
        optimizer.step()
        queue = torch.cat([keys, queue])[: example.QUEUE]
        for average, weight in zip(slow, weights, strict=True):
            average.lerp_(weight.detach(), 0.125)
    encoder.set_weights([*slow, queue])


@pytest.mark.examples
@cells(EXAMPLE)
def test_equals_the_plain_program(backend: str, replicas: int, tmp_path: Path) -> None:
    check(EXAMPLE, plain, backend, replicas, tmp_path)
