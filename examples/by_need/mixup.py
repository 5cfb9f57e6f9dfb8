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


def mixed_batches() -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """One epoch of mixed batches (Zhang et al., "mixup", ICLR 2018): inputs, and probabilities of classes."""
    random = np.random.default_rng(0)
    labels = random.integers(CLASSES, size=90)
    features = (random.normal(size=(90, 8)) + labels[:, None]).astype("float32")
    targets = np.eye(CLASSES, dtype="float32")[labels]
    for start in range(0, len(labels), BATCH):
        x, y = features[start : start + BATCH], targets[start : start + BATCH]
        share = random.beta(0.2, 0.2, size=(len(x), 1)).astype("float32")
        partner = random.permutation(len(x))
        yield share * x + (1 - share) * x[partner], share * y + (1 - share) * y[partner]


spec = isotrain.TrainingSpec(
    name="mixup",
    model=model,
    data=mixed_batches,
    loss={"name": "categorical_crossentropy", "from_logits": True},
    optimizer={"name": "sgd", "lr": 0.125},
    global_batch_size=BATCH,
    epochs=2,
)

if __name__ == "__main__":
    isotrain.run(spec, backend="torch-ddp", replicas=2)
