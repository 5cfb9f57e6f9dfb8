"""How do I log images, histograms and texts, for TensorBoard, Weights & Biases or MLflow?

They are files of steps in the run directory, of which each logger gets what it can show. What rank 0 logs is
recorded.

    python examples/by_need/log_media.py
"""

from __future__ import annotations

from typing import Any

import numpy as np

import isotrain


def model() -> Any:
    """An autoencoder of images of 8 x 8 pixels, 3 numbers wide."""
    import keras

    layers = keras.layers
    narrow, wide = layers.Dense(3, activation="tanh"), layers.Dense(64, activation="sigmoid")
    return keras.Sequential([keras.Input((64,)), narrow, wide])


def data() -> isotrain.DataSet:
    """Images of a bright square on a dark ground, shape [90, 64]."""
    random = np.random.default_rng(0)
    images = np.zeros((90, 8, 8), "float32")
    for image, (row, column) in zip(images, random.integers(6, size=(90, 2)), strict=True):
        image[row : row + 3, column : column + 3] = 1
    return isotrain.DataSet((images.reshape(90, 64), images.reshape(90, 64)))


spec = isotrain.TrainingSpec(
    name="log-media",
    model=model,
    data=data,
    loss="mean_squared_error",
    optimizer={"name": "sgd", "lr": 0.0625},
    global_batch_size=32,
    epochs=2,
    loggers="tensorboard",
)


def train(session: isotrain.Session) -> None:
    """After each epoch, logs an image beside its reconstruction, and the weights of a layer."""
    samples = data().train[0][:1]
    for batch in session.batches():
        loss = session.step(batch)
        if batch.is_last_of_epoch:
            images = np.concatenate([samples, session.call(samples)]).reshape(16, 8)
            session.log_image("reconstruction", np.clip(images, 0, 1))
            session.log_histogram("dense/kernel", session.read_state()["sequential/dense/kernel"])
            session.log_text("summary", f"epoch {batch.epoch}: loss {float(loss):.6f}")
            session.end_epoch(batch.epoch, session.metrics())


if __name__ == "__main__":
    isotrain.launch(train, spec, backend="torch-ddp", replicas=2)
