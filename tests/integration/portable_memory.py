"""Portable models whose memory is planned, and what TensorFlow's allocator sees of a step."""

from __future__ import annotations

from typing import Any

import numpy as np

import isotrain

BATCH = 256


def dense() -> Any:
    import keras

    layers = [keras.layers.Dense(256, activation="gelu") for _ in range(3)]
    dropout = keras.layers.Dropout(0.5)
    return keras.Sequential([keras.Input((64,)), *layers, dropout, keras.layers.Dense(10)])


def convolutional() -> Any:
    import keras

    return keras.Sequential(
        [
            keras.Input((64,)),
            keras.layers.Reshape((8, 8, 1)),
            keras.layers.Conv2D(32, 3, padding="same", activation="relu"),
            keras.layers.BatchNormalization(),
            keras.layers.Conv2D(64, 3, padding="same", activation="relu"),
            keras.layers.Flatten(),
            keras.layers.Dense(10),
        ]
    )


def deep_convolutional() -> Any:
    """A model so deep that the order in which TensorFlow computes gradients changes little."""
    import keras

    layers = [
        layer
        for _ in range(16)
        for layer in (
            keras.layers.Conv2D(16, 3, padding="same", activation="relu"),
            keras.layers.BatchNormalization(),
        )
    ]
    last = [keras.layers.Flatten(), keras.layers.Dense(10)]
    return keras.Sequential([keras.Input((64,)), keras.layers.Reshape((8, 8, 1)), *layers, *last])


def transformer() -> Any:
    import keras

    inputs = keras.Input((64,))
    x = keras.layers.Dense(64)(keras.layers.Reshape((8, 8))(inputs))
    for _ in range(3):
        normed = keras.layers.LayerNormalization()(x)
        x = x + keras.layers.MultiHeadAttention(4, 16, dropout=0.1)(normed, normed)
        hidden = keras.layers.Dense(256, activation="gelu")(keras.layers.LayerNormalization()(x))
        x = x + keras.layers.Dense(64)(hidden)
    pooled = keras.layers.GlobalAveragePooling1D()(x)
    return keras.Model(inputs, keras.layers.Dense(10)(pooled))


def recurrent() -> Any:
    import keras

    layers = [keras.layers.Reshape((8, 8)), keras.layers.LSTM(32)]
    return keras.Sequential([keras.Input((64,)), *layers, keras.layers.Dense(10)])


def module(decorated: bool) -> Any:
    """A tf.Module of two layers, whose `__call__` may be a `tf.function`."""
    import tensorflow as tf

    class Module(tf.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = tf.Variable(tf.random.normal((64, 256), stddev=0.1))
            self.last = tf.Variable(tf.random.normal((256, 10), stddev=0.1))

        def __call__(self, inputs: Any) -> Any:
            return tf.tanh(inputs @ self.first) @ self.last

    if decorated:
        Module.__call__ = tf.function(Module.__call__)  # type: ignore[method-assign]
    return Module()


def plain_module() -> Any:
    return module(False)


def module_with_function() -> Any:
    return module(True)


def data() -> tuple[np.ndarray, np.ndarray]:
    generator = np.random.default_rng(0)
    return generator.normal(size=(2 * BATCH, 64)).astype("float32"), np.arange(2 * BATCH) % 10


def spec(model: Any, **fields: Any) -> dict[str, Any]:
    return {
        "model": model,
        "data": data,
        "loss": {"name": "sparse_categorical_crossentropy", "from_logits": True},
        "optimizer": {"name": "sgd", "lr": 0.01, "momentum": 0.9},
        "global_batch_size": BATCH,
        "steps": 20,
        "threads": 1,
        **fields,
    }


SPECS: dict[str, dict[str, Any]] = {
    "dense": spec(dense),
    "convolutional": spec(convolutional),
    "deep convolutional": spec(deep_convolutional),
    "transformer": spec(transformer),
}


def allocated(session: isotrain.Session) -> int:
    """Largest number of bytes at a time that a step allocates beside those that were there.

    It is the median of steps: TensorFlow computes what is independent in any order. It tells the bytes if
    `TF_CPU_ALLOCATOR_USE_BFC` is true when it starts.
    """
    import tensorflow as tf

    peaks = []
    for batch in session.batches():
        session.group.synchronize_device()
        tf.config.experimental.reset_memory_stats("CPU:0")
        before = tf.config.experimental.get_memory_info("CPU:0")["current"]
        session.step(batch)
        session.group.synchronize_device()
        peaks.append(tf.config.experimental.get_memory_info("CPU:0")["peak"] - before)
    return int(np.median(peaks[4:]))
