"""How do I record the loss of each task of one model, and weigh them myself?

An objective may return losses by name: their sum is trained, and each is recorded in training and evaluation.

    python examples/by_need/multi_task.py
"""

from __future__ import annotations

from typing import Any

import numpy as np

import isotrain


def model() -> Any:
    """A shared trunk with two heads."""
    import keras

    inputs = keras.Input((8,))
    trunk = keras.layers.Dense(16, activation="tanh")(inputs)
    return keras.Model(inputs, [keras.layers.Dense(1)(trunk), keras.layers.Dense(3)(trunk)])


def data() -> isotrain.DataSet:
    """Features, with a price and a kind each; some samples have no price."""
    features = np.random.default_rng(0).normal(size=(90, 8)).astype("float32")
    targets = {
        "price": features.sum(axis=1),
        "priced": (np.arange(90) % 3 > 0).astype("float32"),
        "kind": features[:, :3].argmax(axis=1),
    }
    return isotrain.DataSet(isotrain.sources.arrays(inputs=features, targets=targets))


def losses(model: Any, batch: Any) -> Any:
    """Losses of both tasks: the price's is the mean over the samples that have one."""
    import keras

    inputs, targets = batch
    price, logits = model(inputs)
    errors = (price[:, 0] - targets["price"]) ** 2
    cross_entropy = keras.losses.sparse_categorical_crossentropy(
        targets["kind"], logits, from_logits=True
    )
    return {"price": isotrain.weighted(errors, targets["priced"]), "kind": 0.5 * cross_entropy}


spec = isotrain.TrainingSpec(
    name="multi-task",
    model=model,
    data=data,
    objective=losses,
    optimizer={"name": "sgd", "lr": 0.0625},
    global_batch_size=32,
    epochs=2,
)

if __name__ == "__main__":
    isotrain.run(spec, backend="torch-ddp", replicas=2)
