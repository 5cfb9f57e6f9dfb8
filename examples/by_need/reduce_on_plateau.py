"""How do I lower the learning rate when the validation loss stops improving?

Name the schedule. Its state is in checkpoints, and all processes lower the rate together.

    python examples/by_need/reduce_on_plateau.py
"""

from __future__ import annotations

from typing import Any

import numpy as np

import isotrain


def model() -> Any:
    """A small network of 8 features into one number."""
    import keras

    return keras.Sequential(
        [keras.Input((8,)), keras.layers.Dense(16, activation="tanh"), keras.layers.Dense(1)]
    )


def data() -> isotrain.DataSet:
    """Noisy sums of the features, synthetic, to train and to validate on."""
    random = np.random.default_rng(0)
    features = random.normal(size=(96, 8))
    targets = features.sum(axis=1, keepdims=True) + random.normal(size=(96, 1))
    return isotrain.DataSet(
        train=(features[:64], targets[:64]), validation=(features[64:], targets[64:])
    )


spec = isotrain.TrainingSpec(
    name="reduce-on-plateau",
    model=model,
    data=data,
    loss="mse",
    optimizer={"name": "sgd", "lr": 0.25},
    schedule={"name": "plateau", "metric": "validation_loss", "factor": 0.25, "patience": 1},
    global_batch_size=16,
    epochs=6,
)

if __name__ == "__main__":
    isotrain.run(spec, backend="torch-ddp", replicas=2)
