"""How do I find a learning rate before I train?

`isotrain.find_rate` trains a new model while the rate rises, and suggests where the loss falls fastest.

    python examples/by_need/rate_finder.py
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
    name="rate-finder",
    model=model,
    data=data,
    loss="mse",
    optimizer={"name": "sgd", "lr": 0.125},
    global_batch_size=32,
    epochs=4,
)

if __name__ == "__main__":
    search = isotrain.find_rate(
        spec, backend="torch-ddp", replicas=2, first_rate=1e-3, last_rate=100
    )
    print(f"optimizer.lr: {search.lr}")
    found = spec.replace(optimizer={"name": "sgd", "lr": search.lr or 0.125})
    isotrain.run(found, backend="torch-ddp", replicas=2)
