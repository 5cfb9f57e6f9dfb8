"""How do I validate on several sets by name, every few steps, and keep the best by one of them?

The metrics of the main set are `validation_loss` and so on, those of the set `noisy` `validation_noisy_loss`.

    python examples/by_need/validation_sets.py
"""

from __future__ import annotations

from typing import Any

import numpy as np

import isotrain


def model() -> Any:
    """A small classifier of 8 features into 3 classes."""
    import keras

    hidden = keras.layers.Dense(16, activation="tanh")
    return keras.Sequential([keras.Input((8,)), hidden, keras.layers.Dense(3)])


def data() -> isotrain.DataSet:
    """Points of three clusters, and two sets to validate on: clean and noisy points."""
    random = np.random.default_rng(0)
    labels = random.integers(3, size=120)
    points = random.normal(size=(3, 8))[labels] + 0.5 * random.normal(size=(120, 8))
    noisy = (points + random.normal(size=points.shape)).astype("float32")
    points = points.astype("float32")
    return isotrain.DataSet(
        (points[:90], labels[:90]),
        (points[90:], labels[90:]),
        validation_sets={"noisy": (noisy[90:], labels[90:])},
    )


spec = isotrain.TrainingSpec(
    name="validation-sets",
    model=model,
    data=data,
    loss={"name": "sparse_categorical_crossentropy", "from_logits": True},
    metrics=["accuracy"],
    optimizer={"name": "sgd", "lr": 0.125, "momentum": 0.875},
    global_batch_size=32,
    epochs=2,
    evaluation={"every_steps": 2, "at_start": True},
    checkpoint={"keep_best": {"metric": "validation_noisy_loss", "restore": True}},
)

if __name__ == "__main__":
    result = isotrain.run(spec, backend="torch-ddp", replicas=2)
    for step, loss in result.history.scalars["validation_noisy_loss"].items():
        print(f"after {step} steps: loss on noisy points {loss:.4f}")
