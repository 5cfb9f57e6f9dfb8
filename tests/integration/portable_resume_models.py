"""Portable models of runs that resume: convolutions that are replayed from a captured graph."""

from __future__ import annotations

from typing import Any

import numpy as np


def images() -> tuple[np.ndarray, np.ndarray]:
    """Four global batches of one size, for which frameworks trace once."""
    generator = np.random.default_rng(4)
    inputs = generator.normal(size=(28, 8, 8, 2))
    return inputs, np.sin(inputs[:, 0, :3, 0])


def convolutions() -> Any:
    from keras import Input, Sequential, layers

    return Sequential(
        [
            Input((8, 8, 2)),
            layers.Conv2D(4, 3, activation="relu"),
            layers.Conv2D(4, 3, strides=2),
            layers.Flatten(),
            layers.Dropout(0.25),
            layers.Dense(3),
        ]
    )


def small() -> Any:
    """What is asked of it has nothing to do with its layers."""
    from keras import Input, Sequential, layers

    return Sequential([Input((8, 8, 2)), layers.Flatten(), layers.Dropout(0.25), layers.Dense(3)])


def two_outputs() -> Any:
    from keras import Input, Model, layers

    pixels = Input((8, 8, 2))
    seen = layers.Flatten()(pixels)
    return Model(pixels, {name: layers.Dense(3, name=name)(seen) for name in ("near", "far")})


def falling(learning_rate: float) -> Any:
    from keras import optimizers

    schedule = optimizers.schedules.InverseTimeDecay(learning_rate, 3, 0.5)
    return optimizers.Adam(schedule)


def two_targets() -> tuple[np.ndarray, dict[str, np.ndarray]]:
    inputs, targets = images()
    return inputs, {"near": targets, "far": targets * 2}


def spec(**changes: Any) -> dict[str, Any]:
    return {
        "model": convolutions,
        "data": images,
        "loss": "mean_squared_error",
        "metrics": ["mean_absolute_error"],
        "optimizer": {"name": "adam", "lr": 2.0**-5},
        "global_batch_size": 7,
        "epochs": 2,
        "seed": 3,
        "threads": 1,
        **changes,
    }
