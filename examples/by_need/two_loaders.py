"""How do I train one model on two data loaders at once, such as two tasks with a loss each?

Join the loaders in a generator. Its batches are the global batches; the shorter loader starts again.

    python examples/by_need/two_loaders.py
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np

import isotrain

BATCH = 16


def model() -> Any:
    """A shared trunk with two heads: a regression and a classification."""
    import keras

    inputs = {"left": keras.Input((4,), name="left"), "right": keras.Input((4,), name="right")}
    trunk = keras.layers.Dense(16, activation="tanh")
    price, kind = keras.layers.Dense(1, name="price"), keras.layers.Dense(3, name="kind")
    outputs = {"price": price(trunk(inputs["left"])), "kind": kind(trunk(inputs["right"]))}
    return keras.Model(inputs, outputs)


def loader(task: str, batches: int) -> list[tuple[np.ndarray, np.ndarray]]:
    """A loader of one task: any iterable of batches will do, such as torch's DataLoader."""
    random = np.random.default_rng(len(task))
    features = random.normal(size=(batches, BATCH, 4)).astype("float32")
    if task == "price":
        return [(x, x.sum(axis=1, keepdims=True)) for x in features]
    return [(x, x[:, :3].argmax(axis=1)) for x in features]


def joint_batches() -> Iterator[Any]:
    """One epoch: all batches of the longer loader, each with one of the shorter."""
    prices, kinds = loader("price", 6), itertools.cycle(loader("kind", 4))
    for (left, price), (right, kind) in zip(prices, kinds, strict=False):
        yield {"left": left, "right": right}, {"price": price, "kind": kind}


spec = isotrain.TrainingSpec(
    name="two-loaders",
    model=model,
    data=joint_batches,
    loss={"price": "mse", "kind": {"name": "sparse_categorical_crossentropy", "from_logits": True}},
    loss_weights={"price": 0.5, "kind": 1.0},
    optimizer={"name": "sgd", "lr": 0.125},
    global_batch_size=BATCH,
    epochs=2,
)

if __name__ == "__main__":
    isotrain.run(spec, backend="torch-ddp", replicas=2)
