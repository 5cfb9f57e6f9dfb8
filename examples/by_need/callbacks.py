"""How can code of mine run within `isotrain.run`: after each step, evaluation and epoch?

Callbacks are objects of yours, called in every training process. This one decays the learning rate by hand,
records it as a scalar, and ends the run when the validation accuracy is high enough.

    python examples/by_need/callbacks.py
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

import isotrain


class DecayAndStop(isotrain.Callback):
    """Halves the rate every third step; ends the run at a validation accuracy."""

    def __init__(self, accuracy: float = 1.0) -> None:
        self.accuracy = accuracy

    def on_step(self, session: isotrain.Session, batch: Any, loss: Any) -> None:
        """Scales the rate of the steps to come, alike on every process."""
        session.log({"rate_of_step": session.learning_rate(batch.step)})
        if (batch.step + 1) % 3 == 0:
            session.scale_learning_rate(0.5)

    def on_evaluation(self, session: isotrain.Session, metrics: Mapping[str, float]) -> None:
        """Ends the run: metrics are the same number on every process, so that all decide alike."""
        if metrics["validation_accuracy"] >= self.accuracy:
            session.stop()


def model() -> Any:
    """A small classifier of 8 features into 3 classes."""
    import keras

    hidden = keras.layers.Dense(16, activation="tanh")
    return keras.Sequential([keras.Input((8,)), hidden, keras.layers.Dense(3)])


def data() -> isotrain.DataSet:
    """Points of three clusters; the last quarter is validated on."""
    random = np.random.default_rng(0)
    labels = random.integers(3, size=120)
    points = random.normal(size=(3, 8))[labels] + 2.0 * random.normal(size=(120, 8))
    points = points.astype("float32")
    return isotrain.DataSet((points[:90], labels[:90]), (points[90:], labels[90:]))


spec = isotrain.TrainingSpec(
    name="callbacks",
    model=model,
    data=data,
    loss={"name": "sparse_categorical_crossentropy", "from_logits": True},
    metrics=["accuracy"],
    optimizer={"name": "sgd", "lr": 0.125},
    global_batch_size=32,
    epochs=3,
    callbacks=[DecayAndStop()],
)

if __name__ == "__main__":
    result = isotrain.run(spec, backend="torch-ddp", replicas=2)
    print(result.history.scalars["rate_of_step"])
