"""How do I batch sequences of similar lengths, with a budget of tokens, padded to the longest of their batch?

`order` groups them by length, and `collate` pads them. Padding is not counted in the loss.

    python examples/by_need/length_buckets.py
"""

from __future__ import annotations

from typing import Any

import numpy as np

import isotrain

TOKENS, PADDING = 20, -1


def model() -> Any:
    """A next-token model for sequences of any length."""
    import keras

    return keras.Sequential(
        [
            keras.Input((None,), dtype="int64"),
            keras.layers.Embedding(TOKENS, 8),
            keras.layers.Conv1D(16, 3, padding="causal", activation="tanh"),
            keras.layers.Dense(TOKENS),
        ]
    )


def data() -> isotrain.DataSet:
    """Counting sequences of 3 to 12 tokens: inputs, and the next token of each as targets."""
    random = np.random.default_rng(0)
    lengths = random.integers(3, 13, size=96)
    texts = [(random.integers(TOKENS) + np.arange(length)) % TOKENS for length in lengths]
    return isotrain.DataSet(isotrain.sources.MapStyle([(text[:-1], text[1:]) for text in texts]))


spec = isotrain.TrainingSpec(
    name="length-buckets",
    model=model,
    data=data,
    order={"name": "by-length", "lengths": "inputs", "buckets": [4, 8, 12], "tokens": 96},
    collate={"pad": {"inputs": 0, "targets": PADDING}},
    loss={
        "name": "sparse_categorical_crossentropy",
        "from_logits": True,
        "ignore_class": PADDING,
    },
    optimizer={"name": "sgd", "lr": 0.125},
    global_batch_size=24,  # at most
    epochs=2,
)

if __name__ == "__main__":
    isotrain.run(spec, backend="torch-ddp", replicas=2)
