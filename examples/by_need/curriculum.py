"""How do I begin with easy samples, and add harder ones from epoch to epoch (curriculum learning)?

`order` may be a function of the epoch. A pass has equally many samples in each, so easy ones come more often
at first.

    python examples/by_need/curriculum.py
"""

from __future__ import annotations

from typing import Any

import numpy as np

import isotrain

EPOCHS = 4


def model() -> Any:
    """A small network of 8 features into one number."""
    import keras

    return keras.Sequential(
        [keras.Input((8,)), keras.layers.Dense(16, activation="tanh"), keras.layers.Dense(1)]
    )


def data() -> isotrain.DataSet:
    """Sums of features, in noise that grows with the difficulty of a sample."""
    random = np.random.default_rng(0)
    difficulty = random.uniform(size=96)
    features = random.normal(size=(96, 8))
    noise = difficulty * random.normal(size=96)
    return isotrain.DataSet(
        ({"features": features, "difficulty": difficulty}, features.sum(1) + noise)
    )


def easiest_first(seed: int, epoch: int, length: int, columns: Any) -> np.ndarray:
    """Positions of an epoch: drawn from the easiest quarter, then half, then three quarters, then all."""
    known = length * min(epoch + 1, EPOCHS) // EPOCHS
    easiest = np.argsort(columns["difficulty"], kind="stable")[:known]
    random = np.random.default_rng([seed, epoch])
    return np.concatenate([random.permutation(easiest) for _ in range(-(-length // known))])[
        :length
    ]


def features_only(inputs: Any, targets: Any, random: Any) -> Any:
    """The model does not see how difficult a sample is."""
    return inputs["features"], targets[:, None]


spec = isotrain.TrainingSpec(
    name="curriculum",
    model=model,
    data=data,
    order=easiest_first,
    transform=features_only,
    loss="mse",
    optimizer={"name": "sgd", "lr": 0.0625},
    global_batch_size=16,
    epochs=EPOCHS,
)

if __name__ == "__main__":
    isotrain.run(spec, backend="torch-ddp", replicas=2)
