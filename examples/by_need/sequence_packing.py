"""How do I pack sequences of different lengths into rows of one length, of which none sees another?

Pack in the data function, with the position of each token and the number of its sequence. Attention is
masked to the sequence, and `ignore_class` counts only real tokens in the loss.

    python examples/by_need/sequence_packing.py
"""

from __future__ import annotations

from typing import Any

import numpy as np

import isotrain

LENGTH, TOKENS, IGNORED = 16, 20, -1


def model() -> Any:
    """A next-token model whose tokens attend to those before them in their sequence."""
    import keras

    inputs = {
        name: keras.Input((LENGTH,), dtype="int64", name=name)
        for name in ("tokens", "positions", "sequences")
    }
    words = keras.layers.Embedding(TOKENS, 8)(inputs["tokens"])
    words += keras.layers.Embedding(LENGTH, 8)(inputs["positions"])
    rows, columns = (keras.ops.expand_dims(inputs["sequences"], axis) for axis in (2, 1))
    attention = keras.layers.MultiHeadAttention(2, 4)
    mask = keras.ops.equal(rows, columns)
    seen = attention(words, words, attention_mask=mask, use_causal_mask=True)
    return keras.Model(inputs, keras.layers.Dense(TOKENS)(words + seen))


def packed(sequences: list[np.ndarray]) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """Rows of tokens and of next tokens, first fit; the last token of a sequence predicts nothing."""
    rows: list[list[np.ndarray]] = []
    for sequence in sorted(sequences, key=len, reverse=True):
        fitting = (row for row in rows if sum(map(len, row)) + len(sequence) <= LENGTH)
        if (row := next(fitting, None)) is None:
            rows.append(row := [])
        row.append(sequence)
    shape = len(rows), LENGTH
    inputs = {name: np.zeros(shape, "int64") for name in ("tokens", "positions", "sequences")}
    targets = np.full(shape, IGNORED, "int64")
    for index, row in enumerate(rows):
        start = 0
        for number, sequence in enumerate(row, 1):
            stop = start + len(sequence)
            inputs["tokens"][index, start:stop] = sequence
            inputs["positions"][index, start:stop] = np.arange(len(sequence))
            inputs["sequences"][index, start:stop] = number  # 0 is padding
            targets[index, start : stop - 1] = sequence[1:]
            start = stop
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
