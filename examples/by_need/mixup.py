"""How do I use mixup or CutMix, which mix samples of the whole batch?

In a `transform`, `random.partner()` gives each sample another one of the global batch.

    python examples/by_need/mixup.py
"""

from __future__ import annotations

from typing import Any

import numpy as np

import isotrain

CLASSES = 3


def model() -> Any:
    """A small classifier of 8 features into 3 classes."""
    import keras

    return keras.Sequential(
        [keras.Input((8,)), keras.layers.Dense(16, activation="tanh"), keras.layers.Dense(CLASSES)]
    )


def data() -> isotrain.DataSet:
    """Features, and probabilities of classes, as mixed samples have them."""
    labels = np.arange(90) % CLASSES
    features = np.random.default_rng(0).normal(size=(90, 8)) + labels[:, None]
    return isotrain.DataSet((features.astype("float32"), np.eye(CLASSES, dtype="float32")[labels]))


def mixup(inputs: Any, targets: Any, random: Any) -> Any:
    """Mixup (Zhang et al., ICLR 2018), with a share of each sample of its own."""
    others, other_targets, _ = random.partner()
    share = random.uniform(0.5, 1.0)[:, None].astype("float32")
    return share * inputs + (1 - share) * others, share * targets + (1 - share) * other_targets


spec = isotrain.TrainingSpec(
    name="mixup",
    model=model,
    data=data,
    transform=mixup,
    loss={"name": "categorical_crossentropy", "from_logits": True},
    optimizer={"name": "sgd", "lr": 0.125},
    global_batch_size=32,
    epochs=2,
)

if __name__ == "__main__":
    isotrain.run(spec, backend="torch-ddp", replicas=2)
