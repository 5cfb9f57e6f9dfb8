"""An objective that draws by a generator of its module, and by Keras' for all; no layer has them."""

from __future__ import annotations

from typing import Any

import keras

SEEDS = keras.random.SeedGenerator(11)


def objective(model: Any, batch: Any) -> Any:
    """The mean squared error of noisy inputs and predictions."""
    inputs, targets = batch
    inputs = inputs + keras.random.normal(inputs.shape, stddev=0.1, dtype=inputs.dtype, seed=SEEDS)
    outputs = keras.random.dropout(model(inputs), 0.25)
    return keras.ops.mean(keras.ops.square(outputs - targets), axis=-1), outputs
