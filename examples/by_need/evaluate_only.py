"""How do I evaluate a finished run on other data, with a confusion matrix and other metrics of the whole set?

`metrics_over_all` are functions of all targets and predictions of the set, as NumPy arrays. The result is the
same on every backend and number of replicas.

    python examples/by_need/evaluate_only.py
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


def points(count: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Points of three clusters, float32 of shape [count, 8], and their clusters."""
    random = np.random.default_rng(seed)
    labels = random.integers(3, size=count)
    centers = np.random.default_rng(0).normal(size=(3, 8))
    return (centers[labels] + 2.0 * random.normal(size=(count, 8))).astype("float32"), labels


def data() -> isotrain.DataSet:
    """Points to train on."""
    return isotrain.DataSet(points(90, seed=1))


def confusion(targets: np.ndarray, predictions: np.ndarray) -> np.ndarray:
    """Counts of each class (row) taken for each class (column), shape [3, 3]."""
    counts = np.zeros((3, 3))
    np.add.at(counts, (targets, predictions.argmax(axis=1)), 1)
    return counts


def auc(targets: np.ndarray, predictions: np.ndarray) -> float:
    """The probability that class 0 scores higher on a sample of its own than on another one."""
    own, others = predictions[targets == 0, 0], predictions[targets != 0, 0]
    return float(np.mean(own[:, None] > others[None, :]))


spec = isotrain.TrainingSpec(
    name="evaluate-only",
    model=model,
    data=data,
    loss={"name": "sparse_categorical_crossentropy", "from_logits": True},
    metrics=["accuracy"],
    optimizer={"name": "sgd", "lr": 0.125},
    global_batch_size=32,
    epochs=2,
)
OVER_ALL = {"confusion": confusion, "auc": auc}

if __name__ == "__main__":
    result = isotrain.run(spec, backend="torch-ddp", replicas=2)
    measured = isotrain.evaluate(result, points(50, seed=2), metrics_over_all=OVER_ALL, replicas=2)
    print({name: round(value, 4) for name, value in measured.items()})
