"""How do I record numbers of my own at each step, in the history and in every logger?

`session.log` takes numbers and tensors. It does not wait for the device: a tensor is read when steps are
reported. What rank 0 logs is recorded.

    python examples/by_need/own_scalars.py
"""

from __future__ import annotations

from typing import Any

import numpy as np

import isotrain


def model() -> Any:
    """A small regression model of 8 features."""
    import keras

    hidden = keras.layers.Dense(16, activation="tanh")
    return keras.Sequential([keras.Input((8,)), hidden, keras.layers.Dense(1)])


def data() -> isotrain.DataSet:
    """Points and their distances from the origin."""
    points = np.random.default_rng(0).normal(size=(90, 8)).astype("float32")
    return isotrain.DataSet((points, np.linalg.norm(points, axis=1, keepdims=True)))


spec = isotrain.TrainingSpec(
    name="own-scalars",
    model=model,
    data=data,
    loss="mean_squared_error",
    optimizer={"name": "sgd", "lr": 0.0625},
    global_batch_size=32,
    epochs=2,
    loggers=["csv", "tensorboard"],
)


def train(session: isotrain.Session) -> None:
    """Records the root of each loss, and the average of the losses so far."""
    average = 0.0
    for batch in session.batches():
        loss = session.step(batch)
        average = 0.75 * average + 0.25 * loss  # a tensor: nothing waits for it
        session.log({"rmse": loss**0.5, "average_loss": average})
        if batch.is_last_of_epoch:
            session.end_epoch(batch.epoch, session.metrics())


if __name__ == "__main__":
    isotrain.launch(train, spec, backend="torch-ddp", replicas=2)
