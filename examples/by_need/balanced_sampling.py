"""How do I sample rare classes more often?

Draw each batch with a seed of your own. Every process draws the same batches, and trains on its part.

    python examples/by_need/balanced_sampling.py
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

import isotrain

BATCH, STEPS = 32, 6


def model() -> Any:
    """A small classifier of 8 features into 2 classes."""
    import keras

    return keras.Sequential(
        [keras.Input((8,)), keras.layers.Dense(16, activation="tanh"), keras.layers.Dense(2)]
    )


def samples() -> tuple[np.ndarray, np.ndarray]:
    """Features and labels; one sample in ten is of class 1."""
    random = np.random.default_rng(0)
    labels = (np.arange(200) % 10 == 0).astype("int64")
    return (random.normal(size=(200, 8)) + labels[:, None]).astype("float32"), labels


class Balanced:
    """Batches in which each class is as likely as the other; every epoch has draws of its own."""

    def __init__(self) -> None:
        self.epoch = 0

    def __iter__(self) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        features, labels = samples()
        weights = 1 / np.bincount(labels)[labels]
        random = np.random.default_rng([1, self.epoch])
        self.epoch += 1
        for _ in range(STEPS):
            rows = random.choice(len(labels), size=BATCH, p=weights / weights.sum())
            yield features[rows], labels[rows]


def data() -> isotrain.DataSet:
    """The stream; its number of samples is known, so it is not read ahead to count them."""
    return isotrain.DataSet(isotrain.sources.stream(Balanced(), samples=BATCH * STEPS))


spec = isotrain.TrainingSpec(
    name="balanced-sampling",
    model=model,
    data=data,
    loss={"name": "sparse_categorical_crossentropy", "from_logits": True},
    optimizer={"name": "sgd", "lr": 0.125},
    global_batch_size=BATCH,
    epochs=2,
)

if __name__ == "__main__":
    isotrain.run(spec, backend="torch-ddp", replicas=2)
