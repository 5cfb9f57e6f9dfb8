"""How do I keep, evaluate and export a moving average of the weights (EMA)?

`ema` in the spec. Training goes on with the weights themselves; evaluation, the best checkpoint, the result,
predictions and exports have the average.

    python examples/by_need/ema.py
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
    name="ema",
    model=model,
    data=data,
    loss={"name": "sparse_categorical_crossentropy", "from_logits": True},
    metrics=["sparse_categorical_accuracy"],
    optimizer={"name": "sgd", "lr": 0.125, "momentum": 0.875},
    ema=0.9375,
    global_batch_size=32,
    epochs=4,
)

if __name__ == "__main__":
    result = isotrain.run(spec, backend="torch-ddp", replicas=2)
    print(result.metrics)  # of the average, as are result.weights
