"""How do I use mixup or CutMix, which mix samples of the whole batch?

Mix in the stream of global batches: a `transform` would see one replica's part only.

    python examples/by_need/mixup.py
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

import isotrain

BATCH, CLASSES = 32, 3


def model() -> Any:
    """A small classifier of 8 features into 3 classes."""
    import keras

    return keras.Sequential(
        [keras.Input((8,)), keras.layers.Dense(16, activation="tanh"), keras.layers.Dense(CLASSES)]
    )


class Mixed:
    """Mixed batches (Zhang et al., "mixup", ICLR 2018): inputs, and probabilities of classes."""

    def __init__(self) -> None:
        self.epoch = 0

    def __iter__(self) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        labels = np.arange(90) % CLASSES
        features = np.random.default_rng(0).normal(size=(90, 8)) + labels[:, None]
        targets = np.eye(CLASSES, dtype="float32")[labels]
        random = np.random.default_rng([1, self.epoch])  # every epoch has draws of its own
        self.epoch += 1
        order = random.permutation(90)
        for start in range(0, 90, BATCH):
            rows = order[start : start + BATCH]
            share = random.beta(0.2, 0.2, size=(len(rows), 1)).astype("float32")
            partners = random.permutation(rows)
            x, y = features.astype("float32"), targets
            yield (
                share * x[rows] + (1 - share) * x[partners],
                share * y[rows] + (1 - share) * y[partners],
            )


def data() -> isotrain.DataSet:
    """The stream; its number of samples is known, so it is not read ahead to count them."""
    return isotrain.DataSet(isotrain.sources.stream(Mixed(), samples=90))


spec = isotrain.TrainingSpec(
    name="mixup",
    model=model,
    data=data,
    loss={"name": "categorical_crossentropy", "from_logits": True},
    optimizer={"name": "sgd", "lr": 0.125},
    global_batch_size=BATCH,
    epochs=2,
)

if __name__ == "__main__":
    isotrain.run(spec, backend="torch-ddp", replicas=2)
