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


def weighted(model: Any, batch: tuple[Any, Any]) -> Any:
    """`compile(loss={...}, loss_weights={"priority": 1.0, "department": 0.2})`: one value per sample."""
    import keras

    inputs, targets = batch
    found = model(inputs)
    priority = keras.losses.binary_crossentropy(
        targets["priority"], found["priority"], from_logits=True
    )
    department = keras.losses.categorical_crossentropy(
        targets["department"], found["department"], from_logits=True
    )
    return 1.0 * priority + 0.2 * department


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
    objective=weighted,
    optimizer={"name": "rmsprop", "lr": 0.01},
    global_batch=32,
    epochs=4,
)
