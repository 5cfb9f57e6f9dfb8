"""How do I restart a cosine schedule, with cycles that become longer?

Name the schedule, the length of its first cycle, and how much longer each cycle is than the last.

    python examples/by_need/cosine_restarts.py
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
    """Noisy sums of the features, synthetic."""
    random = np.random.default_rng(0)
    features = random.normal(size=(96, 8))
    targets = features.sum(axis=1, keepdims=True) + random.normal(size=(96, 1))
    return isotrain.DataSet(train=(features, targets))


spec = isotrain.TrainingSpec(
    name="cosine-restarts",
    model=model,
    data=data,
    loss="mse",
    optimizer={"name": "sgd", "lr": 0.125, "momentum": 0.875},
    schedule={
        "name": "cosine-restarts",
        "first_steps": 3,
        "length_factor": 2,
        "final_fraction": 0.125,
    },
    global_batch_size=16,
    epochs=3,
)

if __name__ == "__main__":
    isotrain.run(spec, backend="torch-ddp", replicas=2)
