"""How do I penalise the gradient of a model with respect to its inputs?

`step.gradient` gives it within an objective, on every framework, and can itself be differentiated.

    python examples/by_need/gradient_penalty.py
"""

from __future__ import annotations

from typing import Any

import numpy as np

import isotrain

PENALTY = 0.125


def model() -> Any:
    """A smooth function of 8 features."""
    import keras

    return keras.Sequential(
        [keras.Input((8,)), keras.layers.Dense(16, activation="tanh"), keras.layers.Dense(1)]
    )


def data() -> isotrain.DataSet:
    """Noisy sums of features."""
    random = np.random.default_rng(0)
    features = random.normal(size=(90, 8))
    sums = features.sum(axis=1, keepdims=True) + random.normal(scale=0.1, size=(90, 1))
    return isotrain.DataSet((features.astype("float32"), sums.astype("float32")))


def penalised(model: Any, batch: Any, step: isotrain.StepContext) -> Any:
    """Squared error, and the squared deviation of the gradient's norm from 1, for each sample."""
    from keras import ops

    inputs, targets = batch
    norms = ops.sqrt(ops.sum(step.gradient(model, inputs) ** 2, axis=-1))
    errors = ops.sum((model(inputs) - targets) ** 2, axis=-1)
    return errors + PENALTY * (norms - 1) ** 2


spec = isotrain.TrainingSpec(
    name="gradient-penalty",
    model=model,
    data=data,
    objective=penalised,
    optimizer={"name": "sgd", "lr": 0.03125},
    global_batch_size=32,
    epochs=2,
)

if __name__ == "__main__":
    isotrain.run(spec, backend="torch-ddp", replicas=2)
