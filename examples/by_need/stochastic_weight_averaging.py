"""How do I end with the mean of the weights of the last epochs (SWA)?

`swa` in the spec: from step `start` on, the weights of each `every` steps count alike. Here an epoch has 3
steps, so it is the mean of the weights after the second, third and fourth epoch.

    python examples/by_need/stochastic_weight_averaging.py
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
    """Points of three clusters, to train and to validate on."""
    random = np.random.default_rng(0)
    labels = random.integers(3, size=150)
    centers = random.normal(size=(3, 8))
    points = (centers[labels] + 0.5 * random.normal(size=(150, 8))).astype("float32")
    return isotrain.DataSet((points[:90], labels[:90]), (points[90:], labels[90:]))


spec = isotrain.TrainingSpec(
    name="stochastic-weight-averaging",
    model=model,
    data=data,
    loss={"name": "sparse_categorical_crossentropy", "from_logits": True},
    metrics=["sparse_categorical_accuracy"],
    optimizer={"name": "sgd", "lr": 0.125, "momentum": 0.875},
    swa={"start": 6, "every": 3},
    global_batch_size=32,
    epochs=4,
)

if __name__ == "__main__":
    result = isotrain.run(spec, backend="torch-ddp", replicas=2)
    print(result.metrics)  # of the average, as are result.weights
