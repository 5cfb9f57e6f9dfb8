"""Weights that are frozen and unfrozen within a run, and are optimizer groups with rates of their own."""

from __future__ import annotations

from typing import Any

import numpy as np

import isotrain

STEPS_PER_EPOCH, EPOCHS = 3, 4


def model() -> Any:
    """A backbone and a head for three classes."""
    import keras

    return keras.Sequential(
        [
            keras.Input((8,)),
            keras.layers.Dense(16, activation="tanh", name="backbone"),
            keras.layers.Dense(3, name="head"),
        ]
    )


def data() -> isotrain.DataSet:
    """Features whose largest of three is the class; the last global batch of an epoch is smaller."""
    features = np.random.default_rng(0).normal(size=(90, 8))
    return isotrain.DataSet((features, features[:, :3].argmax(1)))


def train(session: isotrain.Session) -> None:
    """The head alone for an epoch, then all; once without the head; then all at half of the rates."""
    session.freeze("*backbone*")
    for batch in session.batches():
        if batch.step == STEPS_PER_EPOCH:
            session.unfreeze("*backbone*")
        if batch.step == 2 * STEPS_PER_EPOCH:
            session.freeze("*head*")
        if batch.step == 2 * STEPS_PER_EPOCH + 1:
            session.unfreeze("*")
            session.scale_learning_rate(0.5)
        session.step(batch)


spec = isotrain.TrainingSpec(
    name="freezing-groups",
    model=model,
    data=data,
    loss={"name": "sparse_categorical_crossentropy", "from_logits": True},
    optimizer={
        "name": "sgd",
        "lr": 0.25,
        "momentum": 0.5,
        "groups": [
            {"weights": "*backbone*", "lr_factor": 0.5, "schedule": "linear"},
            {"weights": "*bias", "momentum": 0.75},
        ],
    },
    schedule={"name": "step", "every_epochs": 1, "factor": 0.5},
    global_batch_size=32,
    epochs=EPOCHS,
)
