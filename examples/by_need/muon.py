"""How do I train matrices with Muon and everything else with AdamW?

A group with `orthogonalize: false` is AdamW's: here the last layer, as in the paper. Biases are so anyway.

    python examples/by_need/muon.py
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
            keras.layers.Dense(16, activation="tanh", name="hidden"),
            keras.layers.Dense(16, activation="tanh", name="block"),
            keras.layers.Dense(3, name="head"),
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
    name="muon",
    model=model,
    data=data,
    loss={"name": "sparse_categorical_crossentropy", "from_logits": True},
    optimizer={
        "name": "muon",
        "lr": 0.0625,
        "momentum": 0.9375,
        "beta_1": 0.875,
        "beta_2": 0.9375,
        "groups": [{"weights": ["*bias", "*head*"], "orthogonalize": False, "lr_factor": 0.125}],
    },
    global_batch_size=32,
    epochs=2,
)

if __name__ == "__main__":
    isotrain.run(spec, backend="torch-ddp", replicas=2)
