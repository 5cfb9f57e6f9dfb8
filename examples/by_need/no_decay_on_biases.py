"""How do I leave biases and normalization layers out of weight decay?

`optimizer.groups` names weights by patterns; each group sets the options that it has of its own. The names
are those of the checkpoint: `isotrain plan` says how many weights each group has.

    python examples/by_need/no_decay_on_biases.py
"""

from __future__ import annotations

from typing import Any

import numpy as np

import isotrain


def model() -> Any:
    """A classifier of 8 features into 3 classes, with layer normalization."""
    import keras

    return keras.Sequential(
        [
            keras.Input((8,)),
            keras.layers.Dense(16, activation="tanh", name="hidden"),
            keras.layers.LayerNormalization(name="norm"),
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
    name="no-decay-on-biases",
    model=model,
    data=data,
    loss={"name": "sparse_categorical_crossentropy", "from_logits": True},
    optimizer={
        "name": "adamw",
        "lr": 0.0625,
        "weight_decay": 0.125,
        "beta_1": 0.875,
        "beta_2": 0.9375,
        "epsilon": 2.0**-20,
        "groups": [{"weights": ["*bias", "*norm*"], "weight_decay": 0}],
    },
    global_batch_size=32,
    epochs=2,
)

if __name__ == "__main__":
    isotrain.run(spec, backend="torch-ddp", replicas=2)
