"""How do I train on several augmentations of each sample in one batch (repeated augmentation)?

`order: repeated` has each sample several times in its global batch, with random numbers of its own each.
(Hoffer et al., "Augment your batch", CVPR 2020.)

    python examples/by_need/repeated_augmentation.py
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
    """Points of three clusters."""
    random = np.random.default_rng(0)
    labels = random.integers(CLASSES, size=32)
    points = (random.normal(size=(32, 8)) + labels[:, None]).astype("float32")
    return isotrain.DataSet((points, labels))


def augment(inputs: Any, targets: Any, random: Any) -> Any:
    """Adds noise to each sample on its own; the same numbers on every backend and number of replicas."""
    noise = random.normal(shape=inputs.shape[1:]).astype(inputs.dtype)
    return inputs + np.float32(0.1) * noise, targets


spec = isotrain.TrainingSpec(
    name="repeated-augmentation",
    model=model,
    data=data,
    transform=augment,
    order={"name": "repeated", "times": 3},
    loss={"name": "sparse_categorical_crossentropy", "from_logits": True},
    optimizer={"name": "sgd", "lr": 0.125},
    global_batch_size=24,
    epochs=2,
)

if __name__ == "__main__":
    isotrain.run(spec, backend="torch-ddp", replicas=2)
