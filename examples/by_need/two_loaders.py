"""How do I train one model on two data sets at once, such as two tasks with a loss each?

`sources.joined` makes rows of one sample of each; the shorter data set is begun again.

    python examples/by_need/two_loaders.py
"""

from __future__ import annotations

from typing import Any

import numpy as np

import isotrain


def model() -> Any:
    """A shared trunk with two heads: a regression and a classification."""
    import keras

    inputs = {name: keras.Input((4,), name=f"{name}_inputs") for name in ("price", "kind")}
    trunk = keras.layers.Dense(16, activation="tanh")
    price, kind = keras.layers.Dense(1, name="price"), keras.layers.Dense(3, name="kind")
    outputs = {"price": price(trunk(inputs["price"])), "kind": kind(trunk(inputs["kind"]))}
    return keras.Model(inputs, outputs)


def task(name: str, samples: int) -> tuple[np.ndarray, np.ndarray]:
    """Samples of one task: anything that can be read by position will do, such as a torch data set."""
    x = np.random.default_rng(len(name)).normal(size=(samples, 4)).astype("float32")
    return x, x.sum(axis=1, keepdims=True) if name == "price" else x[:, :3].argmax(axis=1)


def data() -> Any:
    """Rows with the inputs and targets of both tasks, by name."""
    return isotrain.sources.joined({"price": task("price", 96), "kind": task("kind", 64)})


spec = isotrain.TrainingSpec(
    name="two-loaders",
    model=model,
    data=data,
    loss={"price": "mse", "kind": {"name": "sparse_categorical_crossentropy", "from_logits": True}},
    loss_weights={"price": 0.5, "kind": 1.0},
    optimizer={"name": "sgd", "lr": 0.125},
    global_batch_size=16,
    epochs=2,
)

if __name__ == "__main__":
    isotrain.run(spec, backend="torch-ddp", replicas=2)
