"""A portable model and data that programs of torch and of Keras train too; see `test_programs_and_specs`."""

from __future__ import annotations

from typing import Any

import numpy as np

SAMPLES, CLASSES = 48, 3


def data() -> tuple[np.ndarray, np.ndarray]:
    """Pictures of two channels, float32 `[48, 6, 6, 2]`, and classes, int64 `[48]`."""
    draw = np.random.default_rng(0)
    pictures = draw.normal(size=(SAMPLES, 6, 6, 2)).astype("float32")
    return pictures, draw.integers(CLASSES, size=SAMPLES)


def model() -> Any:
    """A convolution, the mean over the picture, and a linear layer."""
    import keras
    from keras import layers

    return keras.Sequential(
        [
            keras.Input((6, 6, 2)),
            layers.Conv2D(6, 3, activation="tanh", name="convolution"),
            layers.GlobalAveragePooling2D(name="mean"),
            layers.Dense(CLASSES, name="head"),
        ],
        name="pictures",
    )
