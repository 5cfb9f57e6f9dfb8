"""How do I batch sequences of similar lengths, padded to the longest of their batch?

Give a stream whose batches are the global batches. Padding is not counted in the loss.

    python examples/by_need/length_buckets.py
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

import isotrain

BATCH, TOKENS, PADDING = 16, 20, -1


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


def sequences() -> list[np.ndarray]:
    """Counting sequences of 3 to 12 tokens."""
    random = np.random.default_rng(0)
    lengths = random.integers(3, 13, size=96)
    return [(random.integers(TOKENS) + np.arange(length)) % TOKENS for length in lengths]


class Buckets:
    """Batches of neighbours by length; every epoch has an order of its own."""

    def __init__(self) -> None:
        self.epoch = 0

    def __iter__(self) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        ordered = sorted(sequences(), key=len)
        random = np.random.default_rng([1, self.epoch])
        self.epoch += 1
        starts = random.permutation(range(0, len(ordered), BATCH))
        for start in starts:
            batch = ordered[start : start + BATCH]
            longest = max(map(len, batch))
            padded = np.stack([np.pad(s, (0, longest - len(s)), constant_values=-1) for s in batch])
            yield np.maximum(padded[:, :-1], 0), padded[:, 1:]


def data() -> isotrain.DataSet:
    """The stream; its number of samples is known, so it is not read ahead to count them."""
    return isotrain.DataSet(isotrain.sources.stream(Buckets(), samples=96))


spec = isotrain.TrainingSpec(
    name="length-buckets",
    model=model,
    data=data,
    loss={
        "name": "sparse_categorical_crossentropy",
        "from_logits": True,
        "ignore_class": PADDING,
    },
    optimizer={"name": "sgd", "lr": 0.125},
    global_batch_size=BATCH,
    epochs=2,
)

if __name__ == "__main__":
    isotrain.run(spec, backend="torch-ddp", replicas=2)
