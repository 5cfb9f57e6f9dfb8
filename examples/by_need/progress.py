"""How do I show progress my own way, such as with tqdm or in a notebook?

`on_event` receives every event of the run as a mapping, in the program that started it.

    python examples/by_need/progress.py
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

import isotrain


def model() -> Any:
    """A linear model."""
    import keras

    return keras.Sequential([keras.Input((8,)), keras.layers.Dense(1)])


def data() -> isotrain.DataSet:
    """Sums of features."""
    features = np.random.default_rng(0).normal(size=(96, 8)).astype("float32")
    return isotrain.DataSet((features, features.sum(axis=1, keepdims=True)))


spec = isotrain.TrainingSpec(
    name="progress",
    model=model,
    data=data,
    loss="mse",
    optimizer={"name": "sgd", "lr": 0.0625},
    global_batch_size=32,
    epochs=3,
)


def show(event: Mapping[str, Any]) -> None:
    """Prints a bar of the steps that are done, after each epoch."""
    if event["event"] == "epoch":
        done, total = event["done"], 3 * spec.epochs
        print(f"[{'#' * done}{'.' * (total - done)}] loss {event['loss']:.4f}")


if __name__ == "__main__":
    isotrain.run(spec, backend="torch-ddp", replicas=2, on_event=show)
