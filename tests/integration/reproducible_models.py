"""Small models of several kinds and their data, for runs whose results must have the same bits."""

from __future__ import annotations

from typing import Any

import numpy as np

DRAW = np.random.default_rng(3)
IMAGES = DRAW.standard_normal((60, 12, 12, 1)).astype("float32")
CLASSES = DRAW.integers(0, 10, 60)
WEIGHTS = DRAW.random(60).astype("float32")
WORDS = np.where(np.arange(9) < DRAW.integers(1, 10, 60)[:, None], DRAW.integers(1, 10, (60, 9)), 0)


def images() -> Any:
    return IMAGES, CLASSES


def weighted_images() -> Any:
    return IMAGES, CLASSES, WEIGHTS


def words() -> Any:
    return WORDS, np.roll(WORDS, 1, axis=1)


def mlp() -> Any:
    import keras

    layers = keras.layers
    hidden = [layers.Dense(64, "relu"), layers.Dense(33, "tanh")]
    return keras.Sequential([keras.Input((12, 12, 1)), layers.Flatten(), *hidden, layers.Dense(10)])


def orthogonal() -> Any:
    """Its weights, which have more inputs than outputs, are not laid out row by row."""
    import keras

    layers = keras.layers
    hidden = layers.Dense(130, "relu", kernel_initializer="orthogonal")
    last = layers.Dense(10, kernel_initializer="orthogonal")
    return keras.Sequential([keras.Input((12, 12, 1)), layers.Flatten(), hidden, last])


def counting() -> Any:
    """A network that counts its steps, in a weight that is not trained."""
    import keras

    class Counter(keras.layers.Layer):
        """Counts its calls in training, and changes nothing."""

        def build(self, shape: Any) -> None:
            self.calls = self.add_weight(
                name="calls", dtype="int32", initializer="zeros", trainable=False
            )

        def call(self, inputs: Any, training: bool = False) -> Any:
            if training:
                self.calls.assign(self.calls + 1)
            return inputs

    layers = [Counter(name="counter"), keras.layers.Flatten(), keras.layers.Dense(10)]
    return keras.Sequential([keras.Input((12, 12, 1)), *layers])


def cnn() -> Any:
    """With group normalization, and with batch normalization over each part."""
    import keras

    layers = keras.layers
    return keras.Sequential(
        [
            keras.Input((12, 12, 1)),
            layers.Conv2D(8, 3, padding="same"),
            layers.GroupNormalization(4),
            layers.Activation("relu"),
            layers.MaxPooling2D(),
            layers.Conv2D(16, 3),
            layers.BatchNormalization(),
            layers.GlobalAveragePooling2D(),
            layers.Dense(10),
        ]
    )


def transformer() -> Any:
    import keras

    layers = keras.layers
    inputs = keras.Input((12, 12, 1))
    hidden = layers.Dense(16)(layers.Reshape((12, 12))(inputs))
    normal = layers.LayerNormalization()(hidden)
    hidden = layers.Add()([hidden, layers.MultiHeadAttention(2, 8)(normal, normal)])
    normal = layers.LayerNormalization()(hidden)
    mixed = layers.Dense(16)(layers.Dense(32, "gelu")(normal))
    pooled = layers.GlobalAveragePooling1D()(layers.Add()([hidden, mixed]))
    return keras.Model(inputs, layers.Dense(10)(pooled))


def dropping() -> Any:
    """With random layers, and one that draws the same numbers in each pass."""
    import keras

    class SeededNoise(keras.layers.Layer):
        def call(self, x: Any) -> Any:
            return x + 0.1 * keras.random.normal(keras.ops.shape(x), seed=3)

    layers = keras.layers
    random_layers = [layers.GaussianNoise(0.1), SeededNoise()]
    hidden = [layers.Dropout(0.3), layers.Dense(64, "relu"), *random_layers]
    return keras.Sequential([keras.Input((12, 12, 1)), layers.Flatten(), *hidden, layers.Dense(10)])


def functionally_dropping(seed: int | None = None) -> Any:
    """With a layer that draws by a generator that is not its own: Keras' global one, or one of a seed."""
    import keras

    generator = None if seed is None else keras.random.SeedGenerator(seed)

    class Drop(keras.layers.Layer):
        def call(self, x: Any) -> Any:
            return keras.random.dropout(x, 0.3, seed=generator)

    layers = keras.layers
    return keras.Sequential([keras.Input((12, 12, 1)), layers.Flatten(), Drop(), layers.Dense(10)])


def everything() -> Any:
    """Masked words, dropout, and batch normalization over each part."""
    import keras

    layers = keras.layers
    hidden = [
        layers.Embedding(10, 12, mask_zero=True),
        layers.Dropout(0.2),
        layers.Dense(8, "relu"),
    ]
    return keras.Sequential(
        [keras.Input((9,)), *hidden, layers.BatchNormalization(), layers.Dense(10)]
    )


def lstm() -> Any:
    import keras

    layers = keras.layers
    return keras.Sequential(
        [
            keras.Input((12, 12, 1)),
            layers.Reshape((12, 12)),
            layers.LSTM(24),
            layers.Dense(10),
        ]
    )


def tagger() -> Any:
    """Its loss leaves out padding, and so is divided by the number of words."""
    import keras

    layers = [keras.layers.Embedding(10, 12, mask_zero=True), keras.layers.Dense(10)]
    return keras.Sequential([keras.Input((9,)), *layers])


def module() -> Any:
    import torch
    from torch import nn

    torch.manual_seed(0)
    normalized = [nn.Linear(144, 65), nn.ReLU(), nn.BatchNorm1d(65)]
    return nn.Sequential(nn.Flatten(), *normalized, nn.Linear(65, 10))


def tf_module() -> Any:
    import tensorflow as tf

    class Perceptron(tf.Module):
        def __init__(self) -> None:
            super().__init__()
            draws = tf.random.Generator.from_seed(0)
            self.first = tf.Variable(draws.normal((144, 65)) / 12, name="first")
            self.last = tf.Variable(draws.normal((65, 10)) / 8, name="last")

        def __call__(self, images: Any) -> Any:
            flat = tf.reshape(images, (-1, 144))
            return tf.nn.tanh(flat @ self.first) @ self.last

    return Perceptron()


def transposed() -> Any:
    """A weight is laid out column by column."""
    import torch
    from torch import nn

    torch.manual_seed(0)
    first = nn.Linear(144, 65)
    first.weight = nn.Parameter((torch.randn(144, 65) / 12).t())
    return nn.Sequential(nn.Flatten(), first, nn.Tanh(), nn.Linear(65, 10))


LOSS = {"name": "sparse_categorical_crossentropy", "from_logits": True}
SPEC: dict[str, Any] = {
    "data": images,
    "loss": LOSS,
    "metrics": ["sparse_categorical_accuracy", LOSS],
    "optimizer": {"name": "adam", "lr": 0.003},
    "clip": {"global_norm": 0.5},
    "global_batch_size": 20,
    "epochs": 18,
    "validation_split": 0.2,
    "reproducible": "bits",
}
"""Each epoch has batches of 20, 20 and 8 samples, and the last part of one is smaller than the others."""

_ACCURACY = {"name": "sparse_categorical_accuracy", "weighted": True}
CASES: dict[str, dict[str, Any]] = {
    "mlp": SPEC | {"model": mlp},
    "cnn": SPEC | {"model": cnn, "global_batch_size": 16},
    "transformer": SPEC | {"model": transformer},
    "lstm": SPEC | {"model": lstm},
    "orthogonal": SPEC | {"model": orthogonal},
    "weighted": SPEC | {"model": mlp, "data": weighted_images, "metrics": [_ACCURACY]},
    "tagger": SPEC | {"model": tagger, "data": words, "metrics": ["sparse_categorical_accuracy"]},
    "dropout": SPEC | {"model": dropping, "random_layers": "per-sample"},
    "float64": SPEC | {"model": mlp, "precision": "float64"},
}
EVERYTHING = SPEC | {
    "model": everything,
    "data": words,
    "metrics": ["sparse_categorical_accuracy"],
    "random_layers": "per-sample",
}
NATIVE: dict[str, dict[str, Any]] = {
    "module": SPEC | {"model": {"torch": module}, "global_batch_size": 16},
    "transposed": SPEC | {"model": {"torch": transposed}},
}
