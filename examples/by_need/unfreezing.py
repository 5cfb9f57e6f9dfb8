"""How do I train the head of a model first, and unfreeze its backbone later in the same run?

Give the run two updates, one of the head's weights and one of all, and let your loop choose. While the head
learns, the backbone gets no gradients. The second update begins with an optimizer of its own.

    python examples/by_need/unfreezing.py
"""

from __future__ import annotations

from typing import Any

import numpy as np

import isotrain

FROZEN_EPOCHS = 1


def model() -> Any:
    """A backbone, which would come with trained weights, and a head for three classes."""
    import keras

    return keras.Sequential(
        [
            keras.Input((8,)),
            keras.layers.Dense(16, activation="tanh", name="backbone"),
            keras.layers.Dense(3, name="head"),
        ]
    )


def data() -> isotrain.DataSet:
    """Features whose largest of three is the class."""
    features = np.random.default_rng(0).normal(size=(96, 8)).astype("float32")
    return isotrain.DataSet((features, features[:, :3].argmax(1)))


def train(session: isotrain.Session) -> None:
    """Trains the head, then the whole model."""
    for batch in session.batches():
        session.step(batch, "head" if batch.epoch < FROZEN_EPOCHS else "whole")


spec = isotrain.TrainingSpec(
    name="unfreezing",
    model=model,
    data=data,
    loss={"name": "sparse_categorical_crossentropy", "from_logits": True},
    updates={
        "head": {"weights": "*/head/*", "optimizer": {"name": "sgd", "lr": 0.5, "momentum": 0.5}},
        "whole": {"optimizer": {"name": "sgd", "lr": 0.125, "momentum": 0.75}},
    },
    global_batch_size=32,
    epochs=3,
)

if __name__ == "__main__":
    isotrain.launch(train, spec, backend="torch-ddp", replicas=2)
