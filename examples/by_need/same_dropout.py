"""How do I get the same dropout on any number of GPUs?

`random_layers: per-sample` lets every random layer draw by step and sample. The result is then that of one
replica, on torch and on TensorFlow. In a layer of your own, `isotrain.random` draws in the same way.

    python examples/by_need/same_dropout.py
"""

from __future__ import annotations

from typing import Any

import numpy as np

import isotrain


def model() -> Any:
    """A small classifier with dropout."""
    import keras

    return keras.Sequential(
        [
            keras.Input((8,)),
            keras.layers.Dense(16, activation="tanh"),
            keras.layers.Dropout(0.25),
            keras.layers.Dense(3),
        ]
    )


def data() -> isotrain.DataSet:
    """Points of three clusters."""
    random = np.random.default_rng(0)
    labels = random.integers(3, size=96)
    return isotrain.DataSet(
        ((random.normal(size=(96, 8)) + labels[:, None]).astype("float32"), labels)
    )


spec = isotrain.TrainingSpec(
    name="same-dropout",
    model=model,
    data=data,
    loss={"name": "sparse_categorical_crossentropy", "from_logits": True},
    optimizer={"name": "sgd", "lr": 0.125},
    random_layers="per-sample",
    global_batch_size=32,
    epochs=2,
    seed=5,
)

if __name__ == "__main__":
    isotrain.run(spec, backend="torch-ddp", replicas=2)
