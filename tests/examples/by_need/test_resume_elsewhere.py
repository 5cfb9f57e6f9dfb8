"""A run that is resumed elsewhere against one that is never stopped."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from examples.by_need.harness import BACKENDS, Plain, cells, check_weights, load

EXAMPLE = "resume_elsewhere"


def plain(start: Plain) -> None:
    """Keras' Adam, over all epochs."""
    import keras
    import torch

    weights = start.model.trainable_variables
    options = (float(np.float32(each)) for each in (0.9, 0.999, 1e-7))  # as in every float64 run
    optimizer = keras.optimizers.Adam(0.0078125, *options)
    for inputs, targets in start.batches:
        outputs = start.model(inputs, training=True)
        loss = torch.nn.functional.cross_entropy(outputs, targets.long())
        gradients = torch.autograd.grad(loss, [variable.value for variable in weights])
        with torch.no_grad():
            optimizer.apply(gradients, weights)


@pytest.mark.examples
@cells(EXAMPLE)
def test_equals_the_plain_program(
    backend: str, replicas: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second half is on the next backend, with the other number of replicas."""
    example = load(EXAMPLE)
    monkeypatch.setattr(example, "spec", example.spec.replace(precision="float64", threads=1))
    example.first_half(tmp_path / "run", backend, replicas)
    next_backend = BACKENDS[(BACKENDS.index(backend) + 1) % len(BACKENDS)]
    resumed = example.second_half(tmp_path / "run", next_backend, 3 - replicas)
    check_weights(resumed.weights, EXAMPLE, plain)
