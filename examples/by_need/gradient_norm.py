"""How do I see the norm of the gradients at each step, on every backend?

With `gradient_norm: true` each step records the L2 norm of all gradients, before they are clipped; a run with
`clip: {global_norm: ...}` does so anyway. With a table of patterns, as here, it also records that of the
gradients of these weights, as `gradient_norm_hidden`.

    python examples/by_need/gradient_norm.py
"""

from __future__ import annotations

from typing import Any

import numpy as np

import isotrain


def model() -> Any:
    """A small regression model of 8 features."""
    import keras

    hidden = keras.layers.Dense(16, activation="tanh", name="hidden")
    return keras.Sequential([keras.Input((8,)), hidden, keras.layers.Dense(1, name="output")])


def data() -> isotrain.DataSet:
    """Points and their distances from the origin."""
    points = np.random.default_rng(0).normal(size=(90, 8)).astype("float32")
    return isotrain.DataSet((points, np.linalg.norm(points, axis=1, keepdims=True)))


spec = isotrain.TrainingSpec(
    name="gradient-norm",
    model=model,
    data=data,
    loss="mean_squared_error",
    optimizer={"name": "sgd", "lr": 0.0625},
    gradient_norm={"hidden": "*hidden*", "output": ["*output/kernel", "*output/bias"]},
    global_batch_size=32,
    epochs=2,
)

if __name__ == "__main__":
    result = isotrain.run(spec, backend="torch-ddp", replicas=2)
    hidden = result.history.scalars["gradient_norm_hidden"]
    for step, norm in result.history.scalars["gradient_norm"].items():
        print(f"step {step}: gradient norm {norm:.4f}, of the hidden layer {hidden[step]:.4f}")
