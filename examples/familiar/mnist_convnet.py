"""keras.io's "Simple MNIST convnet", on any backend. The images are made up, so that nothing is downloaded.

isotrain run examples/familiar/mnist_convnet.py:spec --backend tf-mirrored --replicas 2
"""

from __future__ import annotations

from typing import Any

import numpy as np

import isotrain

CLASSES = 4
SIDE = 12


def model() -> Any:
    """The model of keras.io, but smaller."""
    import keras
    from keras import layers

    return keras.Sequential(
        [
            keras.Input((SIDE, SIDE, 1)),
            layers.Conv2D(8, kernel_size=(3, 3), activation="relu"),
            layers.MaxPooling2D(pool_size=(2, 2)),
            layers.Conv2D(8, kernel_size=(3, 3), activation="relu"),
            layers.MaxPooling2D(pool_size=(2, 2)),
            layers.Flatten(),
            layers.Dropout(0.25),
            layers.Dense(CLASSES, activation="softmax"),
        ]
    )


def data(samples: int = 160) -> isotrain.DataSet:
    """Noise with a bright quarter; which one it is is the class, as a one-hot vector."""
    random = np.random.default_rng(0)
    labels = random.integers(CLASSES, size=samples)
    images = random.random((samples, SIDE, SIDE, 1), dtype="float32") * 0.5
    for image, label in zip(images, labels, strict=True):
        row, column = divmod(int(label), 2)
        image[row * 6 : row * 6 + 6, column * 6 : column * 6 + 6] += 0.5
    targets = np.eye(CLASSES, dtype="float32")[labels]
    held_out = samples // 10  # validation_split=0.1
    return isotrain.DataSet(
        (images[held_out:], targets[held_out:]), (images[:held_out], targets[:held_out])
    )


spec = isotrain.TrainingSpec(
    name="mnist-convnet",
    model=model,
    data=data,
    loss="categorical_crossentropy",
    optimizer={"name": "adam", "lr": 0.01},
    metrics=["accuracy"],
    global_batch_size=32,
    epochs=4,
)
