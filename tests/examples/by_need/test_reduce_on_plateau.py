"""Reduction on a plateau against torch's ReduceLROnPlateau, with a validation loss by hand."""

from __future__ import annotations

from pathlib import Path

import pytest
from examples.by_need.harness import Plain, cells, check

EXAMPLE = "reduce_on_plateau"


def plain(start: Plain) -> None:
    """torch's SGD and ReduceLROnPlateau, which is called after each epoch."""
    import torch

    validation = [torch.tensor(array) for array in start.example.data().validation]
    weights = [variable.value for variable in start.model.trainable_variables]
    optimizer = torch.optim.SGD(weights, lr=0.25)
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(
        optimizer, factor=0.25, patience=0, threshold=1e-4, threshold_mode="abs"
    )
    steps_per_epoch = len(start.batches) // start.example.spec.epochs
    for index, (inputs, targets) in enumerate(start.batches):
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(start.model(inputs, training=True), targets).backward()
        optimizer.step()
        if (index + 1) % steps_per_epoch == 0:
            with torch.no_grad():
                outputs = start.model(validation[0], training=False)
                scheduler.step(torch.nn.functional.mse_loss(outputs, validation[1]))
    assert optimizer.param_groups[0]["lr"] < 0.25


@pytest.mark.examples
@cells(EXAMPLE)
def test_equals_the_plain_program(backend: str, replicas: int, tmp_path: Path) -> None:
    check(EXAMPLE, plain, backend, replicas, tmp_path)
