"""How do I train with a global batch that grows from epoch to epoch?

Make the batches yourself: `session.batch` takes any number of rows, and each process passes its part of them.
The rate grows with it. Gradient accumulation only saves memory, so nothing of it has to change within a run.

    python examples/by_need/growing_batch.py
"""

from __future__ import annotations

from typing import Any

import numpy as np

import isotrain

SIZES = {0: 16, 2: 32}
"""Global batch size from each of these epochs on."""
EPOCHS, SAMPLES, RATE = 4, 96, 0.0625


def model() -> Any:
    """A small network of 8 features into one number."""
    import keras

    return keras.Sequential(
        [keras.Input((8,)), keras.layers.Dense(16, activation="tanh"), keras.layers.Dense(1)]
    )


def samples() -> tuple[np.ndarray, np.ndarray]:
    """Noisy sums of the features, synthetic."""
    random = np.random.default_rng(0)
    features = random.normal(size=(SAMPLES, 8))
    return features, features.sum(axis=1, keepdims=True) + random.normal(size=(SAMPLES, 1))


def batches() -> list[np.ndarray]:
    """Indices of the samples of each step, in an order of its own in each epoch."""
    steps = []
    for epoch in range(EPOCHS):
        size = SIZES[max(first for first in SIZES if first <= epoch)]
        order = np.random.default_rng(epoch).permutation(SAMPLES)
        steps += [order[start : start + size] for start in range(0, SAMPLES, size)]
    return steps


def rate(rows: np.ndarray) -> float:
    """Learning rate of a step, linear in the size of its batch."""
    return RATE * len(rows) / SIZES[0]


def train(session: isotrain.Session) -> None:
    """Trains from the step that was not taken yet, also after a resume."""
    features, targets = samples()
    for rows in batches()[session.steps_done :]:
        session.set_learning_rate(rate(rows))
        parts = np.array_split(rows, session.replicas)
        local = np.concatenate([parts[replica] for replica in session.group.local_replicas])
        session.step(session.batch(features[local], targets[local]))


spec = isotrain.TrainingSpec(
    name="growing-batch",
    model=model,
    loss="mse",
    optimizer={"name": "sgd", "lr": RATE},
    global_batch_size=SIZES[0],
    steps=len(batches()),
)

if __name__ == "__main__":
    isotrain.launch(train, spec, backend="torch-ddp", replicas=2)
