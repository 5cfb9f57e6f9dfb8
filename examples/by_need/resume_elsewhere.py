"""How do I stop a run, and resume it on another framework with another number of replicas?

Checkpoints hold all state by neutral names. The resumed run goes on with the next batch.

    python examples/by_need/resume_elsewhere.py
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
    """Points of three clusters."""
    random = np.random.default_rng(0)
    labels = random.integers(3, size=96)
    points = (random.normal(size=(96, 8)) + labels[:, None]).astype("float32")
    return isotrain.DataSet((points, labels))


spec = isotrain.TrainingSpec(
    name="resume-elsewhere",
    model=model,
    data=data,
    loss={"name": "sparse_categorical_crossentropy", "from_logits": True},
    optimizer={"name": "adam", "lr": 0.0078125},
    checkpoint={"every_epochs": 1},
    global_batch_size=32,
    epochs=4,
)


def first_half(folder: Path, backend: str, replicas: int) -> None:
    """Trains two of the four epochs."""
    isotrain.run(spec.replace(epochs=2), backend=backend, replicas=replicas, output=folder)


def second_half(folder: Path, backend: str, replicas: int) -> isotrain.RunResult:
    """Resumes with the whole spec."""
    return isotrain.resume(folder, spec=spec, backend=backend, replicas=replicas)


if __name__ == "__main__":
    first_half(Path("runs/elsewhere"), "torch-ddp", 2)
    second_half(Path("runs/elsewhere"), "tf-mirrored", 1)
