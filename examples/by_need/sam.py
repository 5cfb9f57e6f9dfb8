"""How do I train with two passes per step, as sharpness-aware minimization (SAM) does?

A loop of your own: `session.gradients` gives the mean gradients over the global batch, and
`session.group.compute` moves the weights of every replica. `session.apply_gradients` takes the step.

    python examples/by_need/sam.py
"""

from __future__ import annotations

from typing import Any

import numpy as np

import isotrain

RADIUS = 0.125


def model() -> Any:
    """A small classifier of 8 features into 3 classes."""
    import keras

    return keras.Sequential(
        [
            keras.Input((8,)),
            keras.layers.Dense(16, activation="tanh"),
            keras.layers.Dense(3),
        ]
    )


def data() -> isotrain.DataSet:
    """Points of three clusters; the last global batch of an epoch is smaller."""
    random = np.random.default_rng(0)
    labels = random.integers(3, size=90)
    centers = random.normal(size=(3, 8))
    points = centers[labels] + 0.5 * random.normal(size=(90, 8))
    return isotrain.DataSet((points.astype("float32"), labels))


def climb(replica: Any, gradients: list[Any]) -> Any:
    """Moves the weights to where the loss is highest nearby; returns where they were, as one vector."""
    from keras import ops

    weights = replica.read(("trainable",))
    direction = ops.concatenate([ops.reshape(gradient, (-1,)) for gradient in gradients])
    length = ops.maximum(ops.sqrt(ops.sum(direction**2)), 1e-12)
    replica.write(("trainable",), weights + direction * (RADIUS / length))
    return weights


def go_back(replica: Any, weights: Any) -> None:
    """Moves the weights back."""
    replica.write(("trainable",), weights)


def train(session: isotrain.Session) -> None:
    """Takes each step with the gradients at the highest loss nearby (Foret et al. 2021)."""
    for batch in session.batches():
        gradients, loss = session.gradients(batch)
        weights = session.group.compute(climb, gradients)
        gradients, _ = session.gradients(batch)
        session.group.compute(go_back, weights)
        session.apply_gradients(batch, gradients, loss)


spec = isotrain.TrainingSpec(
    name="sam",
    model=model,
    data=data,
    loss={"name": "sparse_categorical_crossentropy", "from_logits": True},
    optimizer={"name": "sgd", "lr": 0.125, "momentum": 0.875},
    global_batch_size=32,
    epochs=2,
)

if __name__ == "__main__":
    isotrain.launch(train, spec, backend="torch-ddp", replicas=2)
