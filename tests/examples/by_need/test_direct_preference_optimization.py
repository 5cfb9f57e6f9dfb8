"""DPO against a plain loop with a copy of the model as the reference."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from examples.by_need.harness import Plain, cells, check

EXAMPLE = "direct_preference_optimization"


def plain(start: Plain) -> None:
    """torch's SGD on all pairs; the reference is a second model."""
    import keras
    import torch

    example, model = start.example, start.model
    reference = keras.models.clone_model(model)
    reference.set_weights(model.get_weights())
    preferred, rejected = map(torch.from_numpy, example.pairs())

    def margin(net: Any) -> Any:
        def total(texts: torch.Tensor) -> torch.Tensor:
            log_probabilities = net(texts[:, :-1]).log_softmax(-1)
            return log_probabilities.gather(-1, texts[:, 1:, None].long()).sum((1, 2))

        return total(preferred) - total(rejected)

    before = margin(reference).detach()
    optimizer = torch.optim.SGD([each.value for each in model.trainable_variables], lr=0.125)
    for _ in range(example.STEPS):
        optimizer.zero_grad()
        loss = -torch.nn.functional.logsigmoid(example.BETA * (margin(model) - before))
        loss.mean().backward()
        optimizer.step()


@pytest.mark.examples
@cells(EXAMPLE)
def test_equals_the_plain_program(backend: str, replicas: int, tmp_path: Path) -> None:
    check(EXAMPLE, plain, backend, replicas, tmp_path)
