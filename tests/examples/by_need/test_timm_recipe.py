"""A full recipe against each of its parts by hand."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from examples.by_need.harness import Plain, cells, check

EXAMPLE = "timm_recipe"
TOLERANCE = 1e-7
"""Mixed targets become float32, whose sums are 1 within 1e-8: frameworks differ in these."""


def plain(start: Plain) -> None:
    """Keras' AdamW, told by name which weights have no decay; the rest by torch."""
    import keras
    import torch

    optimizer = keras.optimizers.AdamW(0.0625, weight_decay=0.125)
    optimizer.exclude_from_weight_decay(var_names=["bias", "gamma", "beta"])
    variables = start.model.trainable_variables
    weights = [variable.value for variable in variables]
    average = [weight.detach().clone() for weight in weights]
    for step, (images, targets) in enumerate(start.batches):
        cosine = (1 + math.cos(math.pi * (step - 2) / 7)) / 2
        optimizer.learning_rate = 0.0625 * ((step + 1) / 2 if step < 2 else cosine)
        for weight in weights:
            weight.grad = None
        logits = start.model(images, training=True)
        torch.nn.functional.cross_entropy(logits, targets, label_smoothing=0.125).backward()
        torch.nn.utils.clip_grad_norm_(weights, 0.5)
        with torch.no_grad():
            optimizer.apply([weight.grad for weight in weights], variables)
            for mean, weight in zip(average, weights, strict=True):
                mean.lerp_(weight, 0.125)
    with torch.no_grad():
        for weight, mean in zip(weights, average, strict=True):
            weight.copy_(mean)


@pytest.mark.examples
@cells(EXAMPLE)
def test_equals_the_plain_program(backend: str, replicas: int, tmp_path: Path) -> None:
    check(EXAMPLE, plain, backend, replicas, tmp_path, tolerance=TOLERANCE)
