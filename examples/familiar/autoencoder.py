"""keras.io's "Convolutional autoencoder for image denoising", on any backend, with images that are made up.

isotrain run examples/familiar/autoencoder.py:spec --backend tf-multiworker --replicas 2
"""

from __future__ import annotations

from typing import Any

import numpy as np

import isotrain

SIDE = 8


def model() -> Any:
    """An encoder, and a decoder of transposed convolutions."""
    import keras
    from keras import layers

    inputs = keras.Input((SIDE, SIDE, 1))
    x = layers.Conv2D(8, (3, 3), activation="relu", padding="same")(inputs)
    x = layers.MaxPooling2D((2, 2), padding="same")(x)
    x = layers.Conv2DTranspose(8, (3, 3), strides=2, activation="relu", padding="same")(x)
    x = layers.Conv2D(1, (3, 3), activation="sigmoid", padding="same")(x)
    return keras.Model(inputs, x)


def data(samples: int = 96) -> isotrain.DataSet:
    """Images with noise, and without it as the targets: `fit(x=noisy, y=clean)`."""
    random = np.random.default_rng(0)
    bright = random.integers(SIDE // 2, size=samples)
    clean = np.zeros((samples, SIDE, SIDE, 1), "float32")
    for image, row in zip(clean, bright, strict=True):
        image[row : row + SIDE // 2] = 1.0
    noisy = np.clip(clean + 0.4 * random.normal(size=clean.shape), 0, 1).astype("float32")
    return isotrain.DataSet((noisy[16:], clean[16:]), (noisy[:16], clean[:16]))


spec = isotrain.TrainingSpec(
    name="autoencoder",
    model=model,
    data=data,
    loss="binary_crossentropy",
    optimizer={"name": "adam", "lr": 0.01},
    global_batch_size=16,
    epochs=4,
)
