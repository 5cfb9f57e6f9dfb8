"""How do I label the samples that the model is least sure of, and train on those (active learning)?

Every process predicts the whole pool and so chooses the same samples. Each then gives its part of their rows
to `session.batch`. Pseudo-labels are the same loop, with the labels that the model is surest of.

    python examples/by_need/active_learning.py
"""

from __future__ import annotations

from typing import Any

import numpy as np

import isotrain

ROUNDS, STEPS_PER_ROUND, LABELED_PER_ROUND = 3, 4, 7


def model() -> Any:
    """A small classifier of 8 features into 3 classes."""
    import keras

    return keras.Sequential(
        [keras.Input((8,)), keras.layers.Dense(16, "tanh"), keras.layers.Dense(3)]
    )


def pool() -> tuple[np.ndarray, np.ndarray]:
    """Points of three clusters, and the labels that a person would be asked for."""
    random = np.random.default_rng(0)
    labels = random.integers(3, size=60)
    centers = random.normal(size=(3, 8))
    return (centers[labels] + 0.5 * random.normal(size=(60, 8))), labels


def least_sure(logits: np.ndarray, labeled: list[int]) -> list[int]:
    """Samples without a label whose two best classes are closest, by logits `[samples, classes]`."""
    best = np.sort(logits, axis=-1)
    margins = best[:, -1] - best[:, -2]
    margins[labeled] = np.inf
    return [int(index) for index in np.argsort(margins)[:LABELED_PER_ROUND]]


def train(session: isotrain.Session) -> None:
    """Asks for labels, trains on all that are labeled, and so on."""
    points, labels = pool()
    labeled: list[int] = session.notes.setdefault("labeled", [])  # checkpoints hold it
    while not session.is_done:
        if session.steps_done % STEPS_PER_ROUND == 0:
            labeled += least_sure(session.predict(points), labeled)
        rows = session.local_rows(labeled)
        session.step(session.batch(points[rows], labels[rows]))
        session.save_if_due()


spec = isotrain.TrainingSpec(
    name="active-learning",
    model=model,
    loss={"name": "sparse_categorical_crossentropy", "from_logits": True},
    optimizer={"name": "sgd", "lr": 0.125},
    global_batch_size=LABELED_PER_ROUND,
    steps=ROUNDS * STEPS_PER_ROUND,
)

if __name__ == "__main__":
    isotrain.launch(train, spec, backend="torch-ddp", replicas=2)
