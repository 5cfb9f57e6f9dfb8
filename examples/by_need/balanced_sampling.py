"""How do I sample rare classes more often?

`order: balanced` gives each class the same part of every global batch; `weighted` draws by any weights.

    python examples/by_need/balanced_sampling.py
"""

from __future__ import annotations

from typing import Any

import numpy as np

import isotrain


def model() -> Any:
    """A small classifier of 8 features into 2 classes."""
    import keras

    return keras.Sequential(
        [keras.Input((8,)), keras.layers.Dense(16, activation="tanh"), keras.layers.Dense(2)]
    )


def data() -> isotrain.DataSet:
    """Features and labels; one sample in ten is of class 1."""
    random = np.random.default_rng(0)
    labels = (np.arange(200) % 10 == 0).astype("int64")
    features = (random.normal(size=(200, 8)) + labels[:, None]).astype("float32")
    return isotrain.DataSet((features, labels))


spec = isotrain.TrainingSpec(
    name="balanced-sampling",
    model=model,
    data=data,
    order={"name": "balanced", "by": "targets", "samples": 192},
    loss={"name": "sparse_categorical_crossentropy", "from_logits": True},
    optimizer={"name": "sgd", "lr": 0.125},
    global_batch_size=32,
    epochs=2,
)

if __name__ == "__main__":
    isotrain.run(spec, backend="torch-ddp", replicas=2)
