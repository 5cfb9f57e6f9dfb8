"""How do I train with a contrastive loss (SimCLR, CLIP), whose negatives are in the whole global batch?

`step.all_gather` gives the embeddings of all replicas, and is differentiable; the last batch may be uneven.

    python examples/by_need/contrastive.py
"""

from __future__ import annotations

from typing import Any

import numpy as np

import isotrain

TEMPERATURE = 0.25


def model() -> Any:
    """An encoder of 8 features into embeddings of length 4, for both views."""
    import keras

    return keras.Sequential(
        [
            keras.Input((8,)),
            keras.layers.Dense(16, activation="tanh"),
            keras.layers.Dense(4),
            keras.layers.UnitNormalization(),
        ]
    )


def data() -> tuple[np.ndarray, np.ndarray]:
    """Two noisy views of each sample; the second ones are in the place of targets."""
    random = np.random.default_rng(0)
    samples = random.normal(size=(44, 8))
    views = samples + random.normal(scale=0.1, size=(2, 44, 8))
    first, second = views.astype("float32")
    return first, second


def info_nce(model: Any, batch: Any, step: isotrain.StepContext) -> Any:
    """InfoNCE (Oord et al., arXiv 1807.03748) in both directions: one loss per sample."""
    import keras
    from keras import ops

    first, second = (model(view) for view in batch)
    losses = []
    for queries, keys in ((first, second), (second, first)):
        all_keys, index = step.all_gather(keys)
        logits = ops.matmul(queries, ops.transpose(all_keys)) / TEMPERATURE
        labels = index + ops.arange(ops.shape(queries)[0])
        losses.append(
            keras.losses.sparse_categorical_crossentropy(labels, logits, from_logits=True)
        )
    return (losses[0] + losses[1]) / 2


spec = isotrain.TrainingSpec(
    name="contrastive",
    model=model,
    data=data,
    objective=info_nce,
    optimizer={"name": "sgd", "lr": 0.5},
    global_batch_size=16,
    epochs=2,
)

if __name__ == "__main__":
    isotrain.run(spec, backend="torch-ddp", replicas=2)
