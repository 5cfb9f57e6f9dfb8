"""How do I give the learning rate of each step by a function of my own?

`schedule` takes a function from the step to a fraction of the rate, as torch's `LambdaLR` does.

    python examples/by_need/lambda_lr.py
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


def fraction(step: int) -> float:
    """Fraction of the rate: up in 4 steps, then by the inverse root; every fifth step trains nothing."""
    return 0.0 if step % 5 == 4 else min((step + 1) / 4, (4 / (step + 1)) ** 0.5)


spec = isotrain.TrainingSpec(
    name="lambda-lr",
    model=model,
    data=data,
    loss="mse",
    optimizer={"name": "sgd", "lr": 0.125},
    schedule=fraction,
    global_batch_size=16,
    epochs=2,
)

if __name__ == "__main__":
    isotrain.run(spec, backend="torch-ddp", replicas=2)
