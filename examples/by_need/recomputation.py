"""How do I train a model whose activations do not fit into memory?

`recompute` names layers whose activations are computed again in the backward pass (activation checkpointing).

    python examples/by_need/recomputation.py
"""

from __future__ import annotations

from typing import Any

import numpy as np

import isotrain


def model() -> Any:
    """A deep stack of blocks."""
    import keras

    blocks = [keras.layers.Dense(16, activation="tanh", name=f"block_{i}") for i in range(6)]
    return keras.Sequential([keras.Input((8,)), *blocks, keras.layers.Dense(1, name="head")])


def data() -> isotrain.DataSet:
    """Sums of features."""
    features = np.random.default_rng(0).normal(size=(96, 8)).astype("float32")
    return isotrain.DataSet((features, features.sum(axis=1, keepdims=True)))


spec = isotrain.TrainingSpec(
    name="recomputation",
    model=model,
    data=data,
    loss="mse",
    optimizer={"name": "sgd", "lr": 0.0625},
    recompute="block_*",
    global_batch_size=32,
    epochs=2,
)

if __name__ == "__main__":
    isotrain.run(spec, backend="torch-ddp", replicas=2)
