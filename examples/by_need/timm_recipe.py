"""How do I train with a full recipe, as timm has it for images?

Mixup in the stream of batches, label smoothing, AdamW without decay on biases and norms, a warm-up and a
cosine, clipping, and an average of the weights, which the result has.

    python examples/by_need/timm_recipe.py
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

import isotrain

BATCH, CLASSES = 32, 4


def model() -> Any:
    """A small classifier of images of 6 by 6 pixels, with normalization."""
    import keras
    from keras import layers

    return keras.Sequential(
        [
            keras.Input((6, 6, 1)),
            layers.Conv2D(4, 3, name="stem"),
            layers.LayerNormalization(name="norm"),
            layers.Activation("gelu"),
            layers.GlobalAveragePooling2D(),
            layers.Dense(CLASSES, name="head"),
        ]
    )


class Mixed:
    """Batches of mixed images `[samples, 6, 6, 1]`, and probabilities of classes."""

    def __init__(self) -> None:
        self.epoch = 0

    def __iter__(self) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        labels = np.arange(90) % CLASSES
        noise = np.random.default_rng(0).normal(size=(90, 6, 6, 1))
        images, targets = noise + labels[:, None, None, None] / 2, np.eye(CLASSES)[labels]
        random = np.random.default_rng([1, self.epoch])  # every epoch has draws of its own
        self.epoch += 1
        order = random.permutation(90)
        for start in range(0, 90, BATCH):
            rows = order[start : start + BATCH]
            share, partners = random.beta(0.2, 0.2), random.permutation(rows)
            yield (
                share * images[rows] + (1 - share) * images[partners],
                share * targets[rows] + (1 - share) * targets[partners],
            )


def data() -> isotrain.DataSet:
    """The stream; its number of samples is known, so it is not read ahead to count them."""
    return isotrain.DataSet(isotrain.sources.stream(Mixed(), samples=90))


spec = isotrain.TrainingSpec(
    name="timm-recipe",
    model=model,
    data=data,
    loss={"name": "categorical_crossentropy", "from_logits": True, "label_smoothing": 0.125},
    optimizer={
        "name": "adamw",
        "lr": 0.0625,
        "weight_decay": 0.125,
        "groups": [{"weights": ["*bias", "*norm*"], "weight_decay": 0}],
    },
    schedule={"name": "cosine", "warmup_steps": 2},
    clip={"global_norm": 0.5},
    ema=0.875,
    global_batch_size=BATCH,
    steps=9,
)

if __name__ == "__main__":
    isotrain.run(spec, backend="torch-ddp", replicas=2)
