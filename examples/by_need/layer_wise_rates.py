"""How do I fine-tune with smaller learning rates for the layers that come first?

`optimizer.layer_decay` gives the last layer the full rate and each one before it a constant fraction of the
next one's, as in BEiT and timm. `lr_factor` of a group comes on top: here the embedding moves at half of its
layer's rate. The fraction holds for every schedule.

    python examples/by_need/layer_wise_rates.py
"""

from __future__ import annotations

from typing import Any

import numpy as np

import isotrain


def model() -> Any:
    """A classifier of 8 features into 3 classes, with three layers that have weights."""
    import keras

    return keras.Sequential(
        [
            keras.Input((8,)),
            keras.layers.Dense(16, activation="tanh", name="embedding"),
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
    name="layer-wise-rates",
    model=model,
    data=data,
    loss={"name": "sparse_categorical_crossentropy", "from_logits": True},
    optimizer={
        "name": "sgd",
        "lr": 0.125,
        "layer_decay": 0.75,
        "groups": [{"weights": "*embedding*", "lr_factor": 0.5}],
    },
    schedule={"name": "step", "every_epochs": 1, "factor": 0.5},
    global_batch_size=32,
    epochs=2,
)

if __name__ == "__main__":
    isotrain.run(spec, backend="torch-ddp", replicas=2)
