"""Truncated backpropagation against a plain loop that detaches the state."""

from __future__ import annotations

from pathlib import Path

import pytest
from examples.by_need.harness import Plain, cells, check

EXAMPLE = "truncated_backpropagation"


def plain(start: Plain) -> None:
    """torch's SGD on all sequences; the state of one chunk, detached, begins the next."""
    import torch

    example, model = start.example, start.model
    waves, length = torch.from_numpy(example.sequences()), example.LENGTH
    state = torch.zeros(len(waves), example.UNITS, dtype=torch.float64)
    optimizer = torch.optim.SGD([each.value for each in model.trainable_variables], lr=0.125)
    for first in range(0, example.CHUNKS * length, length):
        predicted, last = model([waves[:, first : first + length], state])
        loss = torch.nn.functional.mse_loss(predicted, waves[:, first + 1 : first + length + 1])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        state = last.detach()


@pytest.mark.examples
@cells(EXAMPLE)
def test_equals_the_plain_program(backend: str, replicas: int, tmp_path: Path) -> None:
    check(EXAMPLE, plain, backend, replicas, tmp_path)
