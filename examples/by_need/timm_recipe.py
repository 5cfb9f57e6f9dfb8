"""How do I train with a full recipe, as timm has it for images?

Mixup, label smoothing, AdamW without decay on biases and norms, a warm-up and a
cosine, clipping, and an average of the weights, which the result has.

    python examples/by_need/timm_recipe.py
"""

from __future__ import annotations

from typing import Any

import numpy as np

import isotrain

CLASSES = 4


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


def data() -> isotrain.DataSet:
    """Images `[90, 6, 6, 1]`, and probabilities of classes, as mixed samples have them."""
    labels = np.arange(90) % CLASSES
    noise = np.random.default_rng(0).normal(size=(90, 6, 6, 1))
    return isotrain.DataSet((noise + labels[:, None, None, None] / 2, np.eye(CLASSES)[labels]))


def mixup(images: Any, targets: Any, random: Any) -> Any:
    """Each image with another one of its global batch."""
    others, other_targets, _ = random.partner()
    share = random.uniform(0.5, 1.0)
    mixed = share[:, None, None, None] * (images - others) + others
    return mixed, share[:, None] * (targets - other_targets) + other_targets


spec = isotrain.TrainingSpec(
    name="timm-recipe",
    model=model,
    data=data,
    transform=mixup,
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
    global_batch_size=32,
    steps=9,
)

if __name__ == "__main__":
    isotrain.run(spec, backend="torch-ddp", replicas=2)
