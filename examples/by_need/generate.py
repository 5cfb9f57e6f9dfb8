"""How do I call the model within a loop, to generate text or to look at its layers?

`session.call` gives predictions for inputs of your own, on this process alone; `session.model` is the model.

    python examples/by_need/generate.py
"""

from __future__ import annotations

from typing import Any

import numpy as np

import isotrain

TOKENS, LENGTH = 10, 8


def model() -> Any:
    """A next-token model that looks at the last two tokens."""
    import keras

    return keras.Sequential(
        [
            keras.Input((LENGTH,), dtype="int64"),
            keras.layers.Embedding(TOKENS, 16),
            keras.layers.Conv1D(32, 2, padding="causal", activation="relu"),
            keras.layers.Dense(TOKENS),
        ]
    )


def data() -> isotrain.DataSet:
    """Counting sequences: inputs, and the next token at each position."""
    tokens = (np.arange(LENGTH + 1) + np.arange(100)[:, None]) % TOKENS
    return isotrain.DataSet((tokens[:, :-1], tokens[:, 1:]))


def generate(session: isotrain.Session, start: int) -> list[int]:
    """The most probable continuation of a token, one call of the model for each further token."""
    tokens = np.zeros((1, LENGTH), "int64")
    tokens[0, 0] = start
    for position in range(LENGTH - 1):
        logits = session.call(tokens)
        tokens[0, position + 1] = logits[0, position].argmax()
    return [int(token) for token in tokens[0]]


def train(session: isotrain.Session) -> list[int]:
    """Trains, and generates at the end of each epoch; every process generates the same."""
    generated: list[int] = []
    for batch in session.batches():
        session.step(batch)
        if batch.is_last_of_epoch:
            generated = generate(session, 3)
            if session.is_main:
                print(f"epoch {batch.epoch + 1}: {generated}")
    return generated


spec = isotrain.TrainingSpec(
    name="generate",
    model=model,
    data=data,
    loss={"name": "sparse_categorical_crossentropy", "from_logits": True},
    optimizer={"name": "adam", "lr": 0.0625},
    global_batch_size=25,
    epochs=5,
)

if __name__ == "__main__":
    isotrain.launch(train, spec, backend="torch-ddp", replicas=2)
