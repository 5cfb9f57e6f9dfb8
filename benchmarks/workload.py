"""The models and data that the benchmarks train: for those that measure isotrain alone."""

from __future__ import annotations

from typing import Any

import numpy as np

SAMPLES = 4096
FEATURES = 64
CLASSES = 10
GLOBAL_BATCH = 64
RATE = 0.0625
MOMENTUM = 0.875
SIZES = {"small": (64, 2), "large": (2048, 4)}
"""Width and number of the hidden layers."""


def model(width: int, depth: int) -> Any:
    """Builds a portable multi-layer perceptron."""
    import keras

    layers = [keras.layers.Dense(width, activation="relu") for _ in range(depth)]
    return keras.Sequential([keras.Input((FEATURES,)), *layers, keras.layers.Dense(CLASSES)])


def arrays() -> tuple[np.ndarray, np.ndarray]:
    """Makes the samples: float32 `[SAMPLES, FEATURES]` and labels `[SAMPLES]`."""
    generator = np.random.default_rng(0)
    inputs = generator.standard_normal((SAMPLES, FEATURES)).astype(np.float32)
    return inputs, generator.integers(0, CLASSES, SAMPLES)


def spec(size: str, steps: int) -> dict[str, Any]:
    """The training spec of one size."""
    width, depth = SIZES[size]
    return {
        "name": f"benchmark-{size}",
        "model": model,
        "model_args": {"width": width, "depth": depth},
        "data": arrays,
        "loss": {"name": "sparse_categorical_crossentropy", "from_logits": True},
        "optimizer": {"name": "sgd", "lr": RATE, "momentum": MOMENTUM},
        "global_batch_size": GLOBAL_BATCH,
        "steps": steps,
        "device": "cpu",
    }
