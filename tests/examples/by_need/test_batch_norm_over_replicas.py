"""Synchronised batch normalisation against one process."""

from __future__ import annotations

from pathlib import Path

import pytest
from examples.by_need.harness import Plain, cells, check

EXAMPLE = "batch_norm_over_replicas"


def plain(start: Plain) -> None:
    """Keras' SGD on whole batches."""
    import keras
    import tensorflow as tf

    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    optimizer = keras.optimizers.SGD(0.125)
    for inputs, targets in start.batches:
        with tf.GradientTape() as tape:
            value = loss(targets, start.model(inputs, training=True))
        weights = start.model.trainable_variables
        optimizer.apply(tape.gradient(value, weights), weights)


@pytest.mark.examples
@cells(EXAMPLE)
def test_equals_the_plain_program(backend: str, replicas: int, tmp_path: Path) -> None:
    check(EXAMPLE, plain, backend, replicas, tmp_path, twin_backend="tf-mirrored")
