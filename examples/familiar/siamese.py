"""keras.io's "Image similarity estimation using a Siamese network with a contrastive loss", on any backend.

isotrain run examples/familiar/siamese.py:spec --backend horovod-torch --replicas 2
"""

from __future__ import annotations

from typing import Any

import numpy as np

import isotrain

LENGTH = 12


def model() -> Any:
    """One network for both inputs, and the distance of what it makes of them."""
    import keras
    from keras import layers, ops

    embedding = keras.Sequential(
        [keras.Input((LENGTH,)), layers.Dense(16, activation="tanh"), layers.Dense(8)]
    )
    one, other = keras.Input((LENGTH,)), keras.Input((LENGTH,))

    def distance(vectors: Any) -> Any:
        squares = ops.sum(ops.square(vectors[0] - vectors[1]), axis=1, keepdims=True)
        return ops.sqrt(ops.maximum(squares, 1e-7))

    merged = layers.Lambda(distance, output_shape=(1,))([embedding(one), embedding(other)])
    normal = layers.BatchNormalization()(merged)
    return keras.Model([one, other], layers.Dense(1, activation="sigmoid")(normal))


def contrastive(y_true: Any, y_pred: Any, margin: float = 1.0) -> Any:
    """Contrastive loss as on keras.io (0: a pair of one class); targets [N], predictions [N, 1]."""
    from keras import ops

    square = ops.square(y_pred)
    margin_square = ops.square(ops.maximum(margin - y_pred, 0))
    return ops.mean((1 - y_true) * square + y_true * margin_square)


def data(samples: int = 128) -> isotrain.DataSet:
    """Pairs of vectors; those of one class are near each other. Two inputs are a tuple."""
    random = np.random.default_rng(0)
    different = random.integers(2, size=samples)
    one = random.normal(size=(samples, LENGTH))
    other = one + random.normal(size=one.shape) * np.where(different, 2.0, 0.1)[:, None]
    pairs, labels = (one.astype("float32"), other.astype("float32")), different.astype("float32")
    return isotrain.DataSet((pairs, labels))


spec = isotrain.TrainingSpec(
    name="siamese",
    model=model,
    data=data,
    loss=contrastive,
    optimizer={"name": "rmsprop", "lr": 0.01},
    global_batch_size=32,
    epochs=4,
)
