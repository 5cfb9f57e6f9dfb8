"""How do I find the largest batch that fits into memory?

`isotrain.find_batch` doubles the global batch, each time in processes of its own, until memory runs out.

    python examples/by_need/batch_finder.py
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
    name="batch-finder",
    model=model,
    data=data,
    loss="mse",
    optimizer={"name": "sgd", "lr": 0.125},
    global_batch_size=32,
    epochs=4,
)

if __name__ == "__main__":
    search = isotrain.find_batch(spec, backend="torch-ddp", replicas=2)
    for trial in search.trials:
        print(trial)
    found = spec.replace(global_batch_size=search.fastest)
    isotrain.run(found, backend="torch-ddp", replicas=2)
