"""Keras' functional guide: a model with two outputs, a loss for each, and a weight for each.

isotrain run examples/familiar/two_outputs.py:spec --backend torch-ddp --replicas 2
"""

from __future__ import annotations

from typing import Any

import numpy as np

import isotrain

LENGTH, DEPARTMENTS = 10, 3


def model() -> Any:
    """A ticket's priority, and the department that should have it."""
    import keras
    from keras import layers

    inputs = keras.Input((LENGTH,), name="ticket")
    x = layers.Dense(16, activation="relu")(inputs)
    outputs = {
        "priority": layers.Dense(1, name="priority")(x),
        "department": layers.Dense(DEPARTMENTS, name="department")(x),
    }
    return keras.Model(inputs, outputs)


def data(samples: int = 128) -> isotrain.DataSet:
    """Tickets; the targets have the names of the outputs."""
    random = np.random.default_rng(0)
    tickets = random.normal(size=(samples, LENGTH)).astype("float32")
    targets = {
        "priority": (tickets[:, :1] > 0).astype("float32"),
        "department": np.eye(DEPARTMENTS, dtype="float32")[tickets[:, :DEPARTMENTS].argmax(1)],
    }
    return isotrain.DataSet((tickets, targets))


spec = isotrain.TrainingSpec(
    name="two-outputs",
    model=model,
    data=data,
    loss={
        "priority": {"name": "binary_crossentropy", "from_logits": True},
        "department": {"name": "categorical_crossentropy", "from_logits": True},
    },
    loss_weights={"priority": 1.0, "department": 0.2},
    metrics={"department": ["categorical_accuracy"]},
    optimizer={"name": "rmsprop", "lr": 0.01},
    global_batch_size=32,
    epochs=4,
)
