"""keras.io's "Text classification with Transformer", on any backend, with texts that are made up.

isotrain run examples/familiar/text_classification.py:spec --backend torch-ddp --replicas 2
"""

from __future__ import annotations

from typing import Any

import numpy as np

import isotrain

WORDS = 50
LENGTH = 16


def model(width: int = 16, heads: int = 2, hidden: int = 16) -> Any:
    """The layers are defined in here: a process imports Keras only once its backend is known."""
    import keras
    from keras import layers, ops

    class TransformerBlock(layers.Layer):
        """Attention and a small network, each with a sum and a normalisation."""

        def __init__(self) -> None:
            super().__init__()
            self.attention = layers.MultiHeadAttention(num_heads=heads, key_dim=width)
            self.network = keras.Sequential(
                [layers.Dense(hidden, activation="relu"), layers.Dense(width)]
            )
            self.first = layers.LayerNormalization(epsilon=1e-6)
            self.second = layers.LayerNormalization(epsilon=1e-6)

        def call(self, inputs: Any) -> Any:
            inputs = self.first(inputs + self.attention(inputs, inputs))
            return self.second(inputs + self.network(inputs))

    class TokenAndPositionEmbedding(layers.Layer):
        """A vector for each word, and one for each place."""

        def __init__(self) -> None:
            super().__init__()
            self.tokens = layers.Embedding(input_dim=WORDS, output_dim=width)
            self.places = layers.Embedding(input_dim=LENGTH, output_dim=width)

        def call(self, inputs: Any) -> Any:
            return self.tokens(inputs) + self.places(ops.arange(0, LENGTH))

    inputs = keras.Input((LENGTH,), dtype="int32")
    x = TransformerBlock()(TokenAndPositionEmbedding()(inputs))
    x = layers.GlobalAveragePooling1D()(x)
    return keras.Model(inputs, layers.Dense(2, activation="softmax")(x))


def data(samples: int = 128) -> isotrain.DataSet:
    """Texts of one kind have more words of the first half of the dictionary."""
    random = np.random.default_rng(0)
    labels = random.integers(2, size=samples)
    words = random.integers(WORDS, size=(samples, LENGTH))
    words[labels == 1] //= 2
    texts = words.astype("int32")
    return isotrain.DataSet((texts[16:], labels[16:]), (texts[:16], labels[:16]))


spec = isotrain.TrainingSpec(
    name="text-classification",
    model=model,
    data=data,
    loss="sparse_categorical_crossentropy",
    optimizer={"name": "adam", "lr": 0.01},
    metrics=["accuracy"],
    global_batch_size=32,
    epochs=4,
)
