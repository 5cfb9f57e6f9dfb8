"""How do I give some weights a learning-rate schedule of their own, such as a warm-up for the backbone alone?

A group of the optimizer may have a `schedule`, in place of that of the spec; `lr_factor` comes on top. Here
the new head begins at its full rate and decays, while the layers before it stay as they are for an epoch and
then rise to a quarter of the rate. The history has `learning_rate_group_0` beside the rate of the step, and
`session.learning_rate(step, group=0)` tells it of any step.

    python examples/by_need/group_schedules.py
"""

from __future__ import annotations

from typing import Any

import numpy as np

import isotrain


def model() -> Any:
    """A classifier of 8 features into 3 classes, with three layers that have weights."""
    import keras

    return keras.Sequential(
        [
            keras.Input((8,)),
            keras.layers.Dense(16, activation="tanh", name="embedding"),
            keras.layers.Dense(16, activation="tanh", name="block"),
            keras.layers.Dense(3, name="head"),
        ]
    )


def data() -> isotrain.DataSet:
    """Points of three clusters; the last global batch of an epoch is smaller."""
    random = np.random.default_rng(0)
    labels = random.integers(3, size=90)
    centers = random.normal(size=(3, 8))
    points = centers[labels] + 0.5 * random.normal(size=(90, 8))
    return isotrain.DataSet((points.astype("float32"), labels))


def after_an_epoch(step: int) -> float:
    """Fraction of the peak rate: 0 for the three steps of the first epoch, then up to 1 in three steps."""
    return min(1.0, max(0, step - 2) / 4)


spec = isotrain.TrainingSpec(
    name="group-schedules",
    model=model,
    data=data,
    loss={"name": "sparse_categorical_crossentropy", "from_logits": True},
    optimizer={
        "name": "sgd",
        "lr": 0.125,
        "momentum": 0.75,
        "groups": [
            {"weights": ["*embedding*", "*block*"], "lr_factor": 0.25, "schedule": after_an_epoch}
        ],
    },
    schedule={"name": "step", "every_epochs": 1, "factor": 0.5},
    global_batch_size=32,
    epochs=3,
)

if __name__ == "__main__":
    isotrain.run(spec, backend="torch-ddp", replicas=2)
