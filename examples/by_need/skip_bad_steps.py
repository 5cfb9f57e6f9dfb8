"""How do I go on when a step gives NaN, without its update?

`on_nan="skip"` leaves out steps whose loss or gradients are not finite; ten in a row end the run.

    python examples/by_need/skip_bad_steps.py
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
    """Noisy sums of the features, synthetic; one sample is broken."""
    random = np.random.default_rng(0)
    features = random.normal(size=(96, 8))
    targets = features.sum(axis=1, keepdims=True) + random.normal(size=(96, 1))
    features[40] = np.nan
    return isotrain.DataSet(train=(features, targets))


spec = isotrain.TrainingSpec(
    name="skip-bad-steps",
    model=model,
    data=data,
    loss="mse",
    optimizer={"name": "sgd", "lr": 0.125},
    on_nan="skip",
    global_batch_size=16,
    epochs=2,
)

if __name__ == "__main__":
    isotrain.run(spec, backend="torch-ddp", replicas=2)
