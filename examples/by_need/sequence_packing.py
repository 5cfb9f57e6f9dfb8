"""How do I pack sequences of different lengths into rows of one length?

Pack in the data function, and count only real tokens in the loss by `ignore_class`.

    python examples/by_need/sequence_packing.py
"""

from __future__ import annotations

from typing import Any

import numpy as np

import isotrain

LENGTH, TOKENS, IGNORED = 16, 20, -1


def model() -> Any:
    """A next-token model that looks at the last three tokens."""
    import keras

    return keras.Sequential(
        [
            keras.Input((LENGTH,), dtype="int64"),
            keras.layers.Embedding(TOKENS, 8),
            keras.layers.Conv1D(16, 3, padding="causal", activation="tanh"),
            keras.layers.Dense(TOKENS),
        ]
    )


def packed(sequences: list[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """Rows of tokens and of next tokens, first fit; the last token of a sequence predicts nothing."""
    rows: list[list[np.ndarray]] = []
    for sequence in sorted(sequences, key=len, reverse=True):
        fitting = (row for row in rows if sum(map(len, row)) + len(sequence) <= LENGTH)
        if (row := next(fitting, None)) is None:
            rows.append(row := [])
        row.append(sequence)
    inputs = np.zeros((len(rows), LENGTH), "int64")
    targets = np.full((len(rows), LENGTH), IGNORED, "int64")
    for index, row in enumerate(rows):
        start = 0
        for sequence in row:
            inputs[index, start : start + len(sequence)] = sequence
            targets[index, start : start + len(sequence) - 1] = sequence[1:]
            start += len(sequence)
    return inputs, targets


def data() -> isotrain.DataSet:
    """Counting sequences of 3 to 16 tokens."""
    random = np.random.default_rng(0)
    starts, lengths = random.integers(TOKENS, size=100), random.integers(3, LENGTH + 1, size=100)
    pairs = zip(starts, lengths, strict=True)
    return isotrain.DataSet(packed([(start + np.arange(n)) % TOKENS for start, n in pairs]))


spec = isotrain.TrainingSpec(
    name="sequence-packing",
    model=model,
    data=data,
    loss={
        "name": "sparse_categorical_crossentropy",
        "from_logits": True,
        "ignore_class": IGNORED,
    },
    optimizer={"name": "sgd", "lr": 0.125},
    global_batch_size=16,
    epochs=2,
)

if __name__ == "__main__":
    isotrain.run(spec, backend="torch-ddp", replicas=2)
