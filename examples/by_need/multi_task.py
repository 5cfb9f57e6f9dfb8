"""How do I train on several tasks, and see the loss of each?

An objective returns a table of losses: it trains on their sum, and records the exact mean of each by name.

    python examples/by_need/multi_task.py
"""

from __future__ import annotations

from typing import Any

import numpy as np

import isotrain

CLASSES = 3


def model() -> Any:
    """A shared layer with a head for each task: class and size."""
    import keras

    inputs = keras.Input((8,))
    hidden = keras.layers.Dense(16, activation="tanh")(inputs)
    return keras.Model(
        inputs, {"kind": keras.layers.Dense(CLASSES)(hidden), "size": keras.layers.Dense(1)(hidden)}
    )


def data() -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """Features with a class and a size; the size of every third sample is not known."""
    random = np.random.default_rng(0)
    features = random.normal(size=(44, 8)).astype("float32")
    known = (np.arange(44) % 3 > 0).astype("float32")
    return features, {
        "kind": random.integers(CLASSES, size=44).astype("int32"),
        "size": features.sum(axis=1, keepdims=True),
        "known": known,
    }


def losses_by_task(model: Any, batch: Any) -> Any:
    """Cross-entropy of the class; squared error of the sizes that are known."""
    import keras
    from keras import ops

    features, targets = batch
    outputs = model(features)
    kind = keras.losses.sparse_categorical_crossentropy(
        targets["kind"], outputs["kind"], from_logits=True
    )
    size = ops.sum((outputs["size"] - targets["size"]) ** 2, axis=-1)
    return {"kind": kind, "size": isotrain.weighted(size, targets["known"])}


spec = isotrain.TrainingSpec(
    name="multi_task",
    model=model,
    data=data,
    objective=losses_by_task,
    optimizer={"name": "sgd", "lr": 0.03125},
    global_batch_size=16,
    epochs=2,
)

if __name__ == "__main__":
    result = isotrain.run(spec, backend="torch-ddp", replicas=2)
    print([{name: epoch[name] for name in ("kind", "size")} for epoch in result.history.epochs])
