"""How do I cross-validate: train on each k-1 of k parts, and validate on the remaining one?

The fold is an argument of the data function. Processes start fast after the first run.

    python examples/by_need/k_fold.py
"""

from __future__ import annotations

from typing import Any

import numpy as np

import isotrain

FOLDS = 3


def model() -> Any:
    """A small classifier of 8 features into 3 classes."""
    import keras

    hidden = keras.layers.Dense(16, activation="tanh")
    return keras.Sequential([keras.Input((8,)), hidden, keras.layers.Dense(3)])


def data(fold: int) -> isotrain.DataSet:
    """Points of three clusters; each third point, from number `fold` on, is validated on."""
    random = np.random.default_rng(0)
    labels = random.integers(3, size=96)
    points = random.normal(size=(3, 8))[labels] + 2.0 * random.normal(size=(96, 8))
    points, is_left_out = points.astype("float32"), np.arange(96) % FOLDS == fold
    return isotrain.DataSet(
        (points[~is_left_out], labels[~is_left_out]), (points[is_left_out], labels[is_left_out])
    )


spec = isotrain.TrainingSpec(
    name="k-fold",
    model=model,
    data=data,
    data_args={"fold": 0},
    loss={"name": "sparse_categorical_crossentropy", "from_logits": True},
    metrics=["accuracy"],
    optimizer={"name": "sgd", "lr": 0.125, "momentum": 0.875},
    global_batch_size=32,
    epochs=2,
)


def cross_validate(spec: isotrain.TrainingSpec, **options: Any) -> list[float]:
    """The validation loss of each fold."""
    losses = []
    for fold in range(FOLDS):
        result = isotrain.run(spec.replace(data_args={"fold": fold}), **options)
        losses.append(result.metrics["validation_loss"])
    return losses


if __name__ == "__main__":
    losses = cross_validate(spec, backend="torch-ddp", replicas=2)
    print(f"validation loss {np.mean(losses):.4f} ± {np.std(losses):.4f}")
