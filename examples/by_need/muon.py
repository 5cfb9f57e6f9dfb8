"""How do I train matrices with Muon and everything else with AdamW?

Keras' Muon does both; a custom optimizer that has a parameter `names` learns the names of the weights, by
which it decides. Here the last layer is AdamW's, as in the paper.

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


def muon(lr: float, names: list[str]) -> Any:
    """Muon for the matrices of all layers but the last; AdamW for the rest."""
    import keras

    *_, last = [name for name in names if name.endswith("kernel")]
    return keras.optimizers.Muon(lr, exclude_layers=[last], adam_lr_ratio=0.125)


spec = isotrain.TrainingSpec(
    name="muon",
    model=model,
    data=data,
    loss={"name": "sparse_categorical_crossentropy", "from_logits": True},
    optimizer={"custom": muon, "lr": 0.0625},
    global_batch_size=32,
    epochs=2,
)

if __name__ == "__main__":
    isotrain.run(spec, backend="torch-ddp", replicas=2)
