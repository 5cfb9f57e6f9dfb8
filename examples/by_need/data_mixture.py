"""How do I train on several data sets in given ratios, such as texts of the web and of books?

`sources.mixture` keeps the ratios in every global batch. A small data set is begun again when it is used up.

    python examples/by_need/data_mixture.py
"""

from __future__ import annotations

from typing import Any

import numpy as np

import isotrain


def model() -> Any:
    """A small network of 8 features into one number."""
    import keras

    return keras.Sequential(
        [keras.Input((8,)), keras.layers.Dense(16, activation="tanh"), keras.layers.Dense(1)]
    )


def part(name: str, samples: int) -> tuple[np.ndarray, np.ndarray]:
    """Samples of one origin: anything that can be read by position will do, such as a torch data set."""
    features = np.random.default_rng(len(name)).normal(size=(samples, 8))
    return features, features.sum(axis=1, keepdims=True)


def data() -> Any:
    """Three samples of the web for each of a book."""
    parts = {"web": part("web", 160), "books": part("books", 20)}
    return isotrain.sources.mixture(parts, {"web": 3, "books": 1}, samples=96)


spec = isotrain.TrainingSpec(
    name="data-mixture",
    model=model,
    data=data,
    loss="mse",
    optimizer={"name": "sgd", "lr": 0.0625},
    global_batch_size=16,
    epochs=2,
)

if __name__ == "__main__":
    isotrain.run(spec, backend="torch-ddp", replicas=2)
