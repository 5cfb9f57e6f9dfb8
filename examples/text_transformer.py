"""A small transformer that learns to predict the next character, under any backend.

    python examples/text_transformer.py --backend tf-multiworker:ring --replicas 2

The text is Python's own documentation of its language, which comes with every Python. Guessing by
how often each character occurs costs about 3 nats per character, and this model falls well below.

GELU is written out with `erf`: TensorFlow's own takes a constant through float32, so that float64
runs of two frameworks would agree to 5e-9 only.
"""

from __future__ import annotations

import argparse
import math
from typing import Any

import numpy as np

import isotrain

LENGTH = 64  # characters that the model sees at once
VOCABULARY = 128  # ASCII


def model(width: int = 64, heads: int = 4, blocks: int = 2) -> Any:
    """A causal transformer: int32 [texts, LENGTH] to logits [texts, LENGTH, VOCABULARY]."""
    import keras
    from keras import layers, ops

    class Positions(layers.Layer):
        """Adds a learned vector per position."""

        def build(self, shape: tuple[int, ...]) -> None:
            self.table = self.add_weight(shape=shape[1:], initializer="random_normal")

        def call(self, x: Any) -> Any:
            return x + self.table

    def gelu(x: Any) -> Any:
        return 0.5 * x * (1.0 + ops.erf(x * math.sqrt(0.5)))

    characters = keras.Input((LENGTH,), dtype="int32")
    x = Positions()(layers.Embedding(VOCABULARY, width)(characters))
    for _ in range(blocks):
        y = layers.LayerNormalization()(x)
        x = x + layers.MultiHeadAttention(heads, width // heads)(y, y, use_causal_mask=True)
        y = layers.Dense(4 * width, activation=gelu)(layers.LayerNormalization()(x))
        x = x + layers.Dense(width)(y)
    return keras.Model(characters, layers.Dense(VOCABULARY)(layers.LayerNormalization()(x)))


def text() -> np.ndarray:
    """Python's help topics as ASCII codes, int32 [characters]."""
    from pydoc_data import topics

    joined = "\n".join(topics.topics[name] for name in sorted(topics.topics))
    return np.frombuffer(joined.encode("ascii", "replace"), np.uint8).astype(np.int32)


def data() -> isotrain.DataSet:
    """Pieces of the text, each with the same piece one character on; every tenth validates."""
    codes = text()
    pieces = (len(codes) - 1) // LENGTH
    inputs = codes[: pieces * LENGTH].reshape(pieces, LENGTH)
    targets = codes[1 : pieces * LENGTH + 1].reshape(pieces, LENGTH)
    held_out = np.arange(pieces) % 10 == 0
    return isotrain.DataSet(
        train=(inputs[~held_out], targets[~held_out]),
        validation=(inputs[held_out], targets[held_out]),
    )


def unigram_entropy() -> float:
    """Nats per character when only the characters' frequencies are known."""
    counts = np.bincount(text())
    frequencies = counts[counts > 0] / counts.sum()
    return float(-(frequencies * np.log(frequencies)).sum())


spec = isotrain.TrainingSpec(
    name="text-transformer",
    model=model,
    data=data,
    loss={"name": "sparse_categorical_crossentropy", "from_logits": True},
    metrics=["accuracy"],
    optimizer={"name": "adam", "lr": 2**-8},
    schedule={"name": "cosine", "warmup_steps": 20},
    clip={"global_norm": 1.0},
    global_batch_size=32,
    steps=200,
)


def main() -> None:
    """Trains under the backend that the command line names."""
    parser = argparse.ArgumentParser(description="Train a character-level transformer.")
    parser.add_argument("--backend", default="torch-ddp", help="such as tf-mirrored")
    parser.add_argument("--replicas", type=int, default=1)
    parser.add_argument("--steps", type=int, default=spec.steps)
    args = parser.parse_args()

    result = isotrain.run(
        spec.replace(steps=args.steps), backend=args.backend, replicas=args.replicas
    )
    print(f"knowing only the characters' frequencies: {unigram_entropy():.4f} nats per character")
    print(f"validation loss {result.metrics['validation_loss']:.6f} nats per character")
    print(f"final loss {result.final_loss:.8f}")


if __name__ == "__main__":
    main()
