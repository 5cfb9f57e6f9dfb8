"""How do I go on in the middle of an epoch, as if the run had never been stopped or killed?

Start the program again: it goes on from the last checkpoint, with the next batch of the epoch.

    python examples/by_need/exact_resume.py
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

import isotrain


def model() -> Any:
    """A small classifier of 8 features into 3 classes."""
    import keras

    return keras.Sequential(
        [keras.Input((8,)), keras.layers.Dense(16, activation="tanh"), keras.layers.Dense(3)]
    )


def data() -> isotrain.DataSet:
    """Points of three clusters; each epoch has an order of its own."""
    random = np.random.default_rng(0)
    labels = random.integers(3, size=80)
    points = (random.normal(size=(80, 8)) + labels[:, None]).astype("float32")
    return isotrain.DataSet((points, labels))


spec = isotrain.TrainingSpec(
    name="exact-resume",
    model=model,
    data=data,
    loss={"name": "sparse_categorical_crossentropy", "from_logits": True},
    optimizer={"name": "sgd", "lr": 0.125, "momentum": 0.5},
    checkpoint={"every_steps": 3, "background": False},
    global_batch_size=16,
    epochs=3,
)


def train(spec: isotrain.TrainingSpec, folder: Path, **options: Any) -> isotrain.RunResult:
    """Trains in a folder; goes on if a run was begun there."""
    return isotrain.run(spec, output=folder, resume="auto", **options)


if __name__ == "__main__":
    train(spec, Path("runs/exact"), backend="torch-ddp", replicas=2)
