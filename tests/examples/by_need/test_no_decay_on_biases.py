"""Weight decay on kernels alone against Keras' own exclusion of weights."""

from __future__ import annotations

from pathlib import Path

import pytest
from examples.by_need.harness import Plain, cells, check

EXAMPLE = "no_decay_on_biases"


def plain(start: Plain) -> None:
    """Keras' AdamW, told by name which weights have no decay."""
    import keras
    import torch

    optimizer = keras.optimizers.AdamW(
        0.0625, weight_decay=0.125, beta_1=0.875, beta_2=0.9375, epsilon=2.0**-20
    )
    optimizer.exclude_from_weight_decay(var_names=["bias", "gamma", "beta"])
    variables = start.model.trainable_variables
    for inputs, targets in start.batches:
        logits = start.model(inputs, training=True)
        loss = torch.nn.functional.cross_entropy(logits, targets.long())
        gradients = torch.autograd.grad(loss, [variable.value for variable in variables])
        with torch.no_grad():
            optimizer.apply(list(gradients), variables)


@pytest.mark.examples
@cells(EXAMPLE)
def test_equals_the_plain_program(backend: str, replicas: int, tmp_path: Path) -> None:
    check(EXAMPLE, plain, backend, replicas, tmp_path)
