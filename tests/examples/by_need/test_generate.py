"""Generation within a loop: the same tokens on every process and backend, by the weights of a plain loop."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from examples.by_need.harness import Plain, cells, check, load

import isotrain

EXAMPLE = "generate"


def plain(start: Plain) -> None:
    """Keras' Adam."""
    import keras
    import torch

    weights = start.model.trainable_variables
    options = (float(np.float32(each)) for each in (0.9, 0.999, 1e-7))  # as in every float64 run
    optimizer = keras.optimizers.Adam(0.0625, *options)
    for inputs, targets in start.batches:
        outputs = start.model(inputs, training=True)
        loss = torch.nn.functional.cross_entropy(outputs.flatten(0, 1), targets.long().flatten())
        gradients = torch.autograd.grad(loss, [variable.value for variable in weights])
        with torch.no_grad():
            optimizer.apply(gradients, weights)


@pytest.mark.examples
@cells(EXAMPLE)
def test_equals_the_plain_program(backend: str, replicas: int, tmp_path: Path) -> None:
    check(EXAMPLE, plain, backend, replicas, tmp_path)


@pytest.mark.examples
@cells(EXAMPLE)
def test_counts_on_every_process(backend: str, replicas: int, tmp_path: Path) -> None:
    example = load(EXAMPLE)
    generated = isotrain.launch(
        example.train,
        example.spec.replace(threads=1),
        backend=backend,
        replicas=replicas,
        output=tmp_path / "run",
        on_event=lambda event: None,
    )
    assert all(tokens == [3, 4, 5, 6, 7, 8, 9, 0] for tokens in generated)
