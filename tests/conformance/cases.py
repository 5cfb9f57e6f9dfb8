"""What the tests of parity and native equality train: models, data and specs; isotrain is not imported.

One portable model has two towers, a small convolutional network and a small causal transformer, and one
spec trains both at once; another is quick to trace. All hyperparameters are exact in float32, through which
TensorFlow passes Python numbers.
"""

from __future__ import annotations

import math
import os
from typing import Any

import numpy as np

SAMPLES = 25
GLOBAL_BATCH = 8
"""Global batches of 8, 8, 8 and 1: even over 2 replicas, uneven over 3; the last leaves replicas empty."""
EPOCHS = 2
SEED = 7
CLASSES = 5
LETTERS = 11
LENGTH = 6
WIDTH = 8
THREADS = int(os.environ.get("ISOTRAIN_TEST_THREADS", "1"))
"""Of each replica: `make test-kernels` says how many."""

Arrays = dict[str, np.ndarray]

OPTIMIZERS: dict[str, dict[str, Any]] = {
    "sgd": {"name": "sgd", "lr": 0.125, "momentum": 0.875},
    "adam": {
        "name": "adam",
        "lr": 2.0**-7,
        "beta_1": 0.875,
        "beta_2": 0.96875,
        "epsilon": 2.0**-13,
    },
    "adamw": {
        "name": "adamw",
        "lr": 2.0**-7,
        "beta_1": 0.875,
        "beta_2": 0.96875,
        "epsilon": 2.0**-13,
        "weight_decay": 0.0625,
    },
}


def training_data(precision: str = "float32") -> tuple[Arrays, Arrays]:
    """Images with a class each, and texts with the letter that follows each letter."""
    generator = np.random.default_rng(17)
    images = generator.normal(size=(SAMPLES, 8, 8, 2)).astype(precision)
    classes = generator.integers(CLASSES, size=SAMPLES)
    text = generator.integers(LETTERS, size=(SAMPLES, LENGTH + 1))
    places = np.tile(np.arange(LENGTH), (SAMPLES, 1))
    inputs = {"image": images, "text": text[:, :-1].copy(), "place": places}
    return inputs, {"class": classes, "next": text[:, 1:].copy()}


def gelu(x: Any) -> Any:
    """The exact GELU; Keras' own is computed in float32 on one framework."""
    from keras import ops

    return x * 0.5 * (1.0 + ops.erf(x * math.sqrt(0.5)))


def portable_model() -> Any:
    """Both towers; outputs the logits of the class and those of every next letter."""
    import keras
    from keras import layers

    image = keras.Input((8, 8, 2), name="image")
    x = layers.Conv2D(4, 3, activation="relu", name="conv_1")(image)
    x = layers.MaxPooling2D(2)(x)
    x = layers.Conv2D(6, 2, strides=2, padding="same", activation="relu", name="conv_2")(x)
    x = layers.Dense(CLASSES, name="classify")(layers.Flatten()(x))

    text = keras.Input((LENGTH,), dtype="int32", name="text")
    place = keras.Input((LENGTH,), dtype="int32", name="place")
    y = layers.Embedding(LETTERS, WIDTH, name="letters")(text)
    y = y + layers.Embedding(LENGTH, WIDTH, name="places")(place)
    z = layers.LayerNormalization(epsilon=2.0**-10, name="norm_1")(y)
    attention = layers.MultiHeadAttention(2, WIDTH // 2, use_bias=False, name="attention")
    y = y + attention(z, z, use_causal_mask=True)
    z = layers.LayerNormalization(epsilon=2.0**-10, name="norm_2")(y)
    z = layers.Dense(2 * WIDTH, activation=gelu, name="widen")(z)
    y = y + layers.Dense(WIDTH, name="narrow")(z)
    y = layers.Dense(LETTERS, name="next_letter")(y)
    return keras.Model({"image": image, "text": text, "place": place}, {"class": x, "next": y})


def small_model() -> Any:
    """A model with the same inputs and outputs, and few weights."""
    import keras
    from keras import layers

    image = keras.Input((8, 8, 2), name="image")
    x = layers.Dense(CLASSES, name="classify")(layers.Flatten()(image))
    text = keras.Input((LENGTH,), dtype="int32", name="text")
    place = keras.Input((LENGTH,), dtype="int32", name="place")
    letters = layers.Embedding(LETTERS, WIDTH, name="letters")(text)
    places = layers.Embedding(LENGTH, WIDTH, name="places")(place)
    y = layers.Dense(LETTERS, name="next_letter")(
        layers.LayerNormalization(epsilon=2.0**-10)(letters + places)
    )
    return keras.Model({"image": image, "text": text, "place": place}, {"class": x, "next": y})


def both_losses(outputs: Any, targets: Any) -> Any:
    """Cross-entropy of the classes plus that of the letters: the mean over the samples."""
    import keras

    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    return loss(targets["class"], outputs["class"]) + loss(targets["next"], outputs["next"])


def objective(model: Any, batch: Any) -> Any:
    """The spec's objective."""
    inputs, targets = batch
    return both_losses(model(inputs), targets)


def spec(optimizer: str, precision: str, **changes: Any) -> dict[str, Any]:
    """The portable model's spec."""
    return {
        "name": "parity",
        "model": portable_model,
        "objective": objective,
        "data": training_data,
        "data_args": {"precision": precision},
        "optimizer": OPTIMIZERS[optimizer],
        "global_batch_size": GLOBAL_BATCH,
        "epochs": EPOCHS,
        "seed": SEED,
        "precision": precision,
        "threads": THREADS,
        "timeouts": {"progress": 100.0},
        **changes,
    }


CLIPPED = {"clip": {"global_norm": 0.5}}


def torch_model() -> Any:
    """A native torch module of images only."""
    from torch import nn

    return nn.Sequential(
        nn.Conv2d(2, 4, 3),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(36, CLASSES),
    )


def torch_data() -> tuple[np.ndarray, np.ndarray]:
    """Images with channels first, and their classes."""
    inputs, targets = training_data()
    return np.ascontiguousarray(inputs["image"].transpose(0, 3, 1, 2)), targets["class"]


def torch_loss(targets: Any, logits: Any) -> Any:
    """Cross-entropy as torch has it."""
    from torch.nn import functional

    return functional.cross_entropy(logits, targets)


def native_torch_spec(optimizer: str) -> dict[str, Any]:
    """The native torch module's spec."""
    return {
        "name": "native",
        "model": {"torch": torch_model},
        "loss": {"torch": torch_loss},
        "data": torch_data,
        "optimizer": OPTIMIZERS[optimizer],
        "global_batch_size": GLOBAL_BATCH,
        "epochs": EPOCHS,
        "seed": SEED,
        "threads": THREADS,
    }
