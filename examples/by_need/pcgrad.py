"""How do I train one model on two tasks whose gradients are in conflict, as PCGrad does?

A loop of your own: `session.gradients` gives the mean gradients of each task, chosen by `values`;
`session.group.compute` combines them on every replica, and `session.apply_gradients` takes the step.

    python examples/by_need/pcgrad.py
"""

from __future__ import annotations

from typing import Any

import numpy as np

import isotrain


def model() -> Any:
    """A regression of two targets from 8 features, with one hidden layer for both."""
    import keras

    return keras.Sequential(
        [
            keras.Input((8,)),
            keras.layers.Dense(16, activation="tanh"),
            keras.layers.Dense(2),
        ]
    )


def data() -> tuple[np.ndarray, np.ndarray]:
    """Two targets that contradict each other in part."""
    random = np.random.default_rng(0)
    inputs = random.normal(size=(60, 8)).astype("float32")
    first = np.sin(inputs.sum(axis=1))
    return inputs, np.stack([first, inputs[:, 0] - first], axis=1).astype("float32")


def task_loss(model: Any, batch: Any, step: isotrain.StepContext) -> Any:
    """Squared error of the task that the step asks for."""
    inputs, targets = batch
    errors = (model(inputs) - targets) ** 2
    task = step.values["task"]
    return (1.0 - task) * errors[:, 0] + task * errors[:, 1]


def without_conflict(replica: Any, first: list[Any], second: list[Any]) -> list[Any]:
    """Sum of two gradients, each without its part against the other (Yu et al. 2020)."""
    from keras import ops

    def dot(left: list[Any], right: list[Any]) -> Any:
        return sum(ops.sum(a * b) for a, b in zip(left, right, strict=True))

    conflict = ops.minimum(dot(first, second), 0.0)
    in_first = conflict / ops.maximum(dot(second, second), 1e-30)
    in_second = conflict / ops.maximum(dot(first, first), 1e-30)
    return [a - in_first * b + b - in_second * a for a, b in zip(first, second, strict=True)]


def train(session: isotrain.Session) -> None:
    """Takes each step with the gradients of both tasks."""
    for batch in session.batches():
        first, loss = session.gradients(batch, values={"task": 0})
        second, other_loss = session.gradients(batch, values={"task": 1})
        combined = session.group.compute(without_conflict, first, second)
        session.apply_gradients(batch, combined, loss + other_loss)


spec = isotrain.TrainingSpec(
    name="pcgrad",
    model=model,
    data=data,
    objective=task_loss,
    values={"task": 0},
    optimizer={"name": "sgd", "lr": 0.125},
    global_batch_size=16,
    epochs=2,
)

if __name__ == "__main__":
    isotrain.launch(train, spec, backend="torch-ddp", replicas=2)
