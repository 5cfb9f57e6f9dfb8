"""How do I train by the one-cycle policy, with a momentum that falls while the rate rises?

Name the schedule. `momentum_range` also moves the momentum, the other way than the rate.

    python examples/by_need/one_cycle.py
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
    name="one-cycle",
    model=model,
    data=data,
    loss="mse",
    optimizer={"name": "sgd", "lr": 0.125, "momentum": 0.9},
    schedule={"name": "one-cycle", "momentum_range": [0.75, 0.9375]},
    global_batch_size=16,
    epochs=3,
)

if __name__ == "__main__":
    isotrain.run(spec, backend="torch-ddp", replicas=2)
