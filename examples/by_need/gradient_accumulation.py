"""How do I train on a large batch that does not fit into memory?

`gradient_accumulation_steps` cuts each replica's part of the global batch into micro-batches. The gradients
are those of the whole batch, to rounding: only memory changes.

    python examples/by_need/gradient_accumulation.py
"""

from __future__ import annotations

from typing import Any

import numpy as np

import isotrain


def model() -> Any:
    """A small classifier of 8 features into 3 classes."""
    import keras

    return keras.Sequential(
        [
            keras.Input((8,)),
            keras.layers.Dense(16, activation="tanh"),
            keras.layers.Dense(3),
        ]
    )


def data() -> isotrain.DataSet:
    """Points of three clusters; the last global batch of an epoch is smaller."""
    random = np.random.default_rng(0)
    labels = random.integers(3, size=90)
    centers = random.normal(size=(3, 8))
    points = centers[labels] + 0.5 * random.normal(size=(90, 8))
    return isotrain.DataSet((points.astype("float32"), labels))


spec = isotrain.TrainingSpec(
    name="gradient-accumulation",
    model=model,
    data=data,
    loss={"name": "sparse_categorical_crossentropy", "from_logits": True},
    optimizer={"name": "sgd", "lr": 0.125, "momentum": 0.875},
    global_batch_size=32,
    gradient_accumulation_steps=4,
    epochs=2,
)

if __name__ == "__main__":
    isotrain.run(spec, backend="torch-ddp", replicas=2)
