"""How do I train against a moving average of the model itself (mean teacher)?

`ema` in the spec is the teacher. Within `session.averaged()` the model has its weights, so that
`session.call` gives its predictions of the samples without labels; `session.batch` makes them targets.

    python examples/by_need/mean_teacher.py
"""

from __future__ import annotations

from typing import Any

import numpy as np

import isotrain

STEPS, LABELED, UNLABELED = 8, 6, 10


def model() -> Any:
    """A small classifier of 8 features into 3 classes."""
    import keras

    return keras.Sequential(
        [keras.Input((8,)), keras.layers.Dense(16, "tanh"), keras.layers.Dense(3)]
    )


def samples(step: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Samples, noisy copies of them, and labels one-hot, which are zeros from `LABELED` on."""
    random = np.random.default_rng(step)
    labels = random.integers(3, size=LABELED + UNLABELED)
    points = np.eye(3)[labels] @ np.random.default_rng(0).normal(size=(3, 8))
    points += 0.5 * random.normal(size=points.shape)
    one_hot = np.eye(3)[labels] * (np.arange(len(labels)) < LABELED)[:, None]
    return points, points + 0.25 * random.normal(size=points.shape), one_hot


def objective(model: Any, batch: Any) -> Any:
    """Cross-entropy of the labels and squared difference from the teacher, shape `[rows]`."""
    from keras import ops

    noisy, (one_hot, teacher) = batch
    logits = model(noisy)
    cross_entropy = -ops.sum(one_hot * ops.log_softmax(logits), -1)
    return cross_entropy + ops.mean((logits - teacher) ** 2, -1)


def train(session: isotrain.Session) -> None:
    """Takes each step against the teacher of the step before."""
    while not session.is_done:
        points, noisy, one_hot = map(session.local_rows, samples(session.steps_done))
        with session.averaged():
            teacher = session.call(points)
        session.step(session.batch(noisy, (one_hot, teacher)))


spec = isotrain.TrainingSpec(
    name="mean-teacher",
    model=model,
    objective=objective,
    optimizer={"name": "sgd", "lr": 0.125},
    ema=0.875,
    global_batch_size=LABELED + UNLABELED,
    steps=STEPS,
)

if __name__ == "__main__":
    isotrain.launch(train, spec, backend="torch-ddp", replicas=2)
