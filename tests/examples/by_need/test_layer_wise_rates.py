"""Layer-wise rates against torch's SGD with a parameter group per layer."""

from __future__ import annotations

from pathlib import Path

import pytest
from examples.by_need.harness import Plain, cells, check

EXAMPLE = "layer_wise_rates"


def plain(start: Plain) -> None:
    """torch's SGD, whose rates a scheduler halves after the first of two epochs."""
    import torch

    layers = [layer for layer in start.model.layers if layer.trainable_variables]
    groups = [
        {"params": [variable.value for variable in layer.trainable_variables], "lr": 0.125 * factor}
        for layer, factor in zip(layers, [0.75**2 / 2, 0.75, 1.0], strict=True)
    ]
    optimizer = torch.optim.SGD(groups)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, len(start.batches) // 2, 0.5)
    for inputs, targets in start.batches:
        optimizer.zero_grad()
        logits = start.model(inputs, training=True)
        torch.nn.functional.cross_entropy(logits, targets.long()).backward()
        optimizer.step()
        scheduler.step()


@pytest.mark.examples
@cells(EXAMPLE)
def test_equals_the_plain_program(backend: str, replicas: int, tmp_path: Path) -> None:
    check(EXAMPLE, plain, backend, replicas, tmp_path)
