"""How do I average the loss of a language model over all tokens that count, in the whole global batch?

`isotrain.weighted(losses, weights)` divides by the sum of the weights over all replicas and micro-batches.

    python examples/by_need/token_weights.py
"""

from __future__ import annotations

from typing import Any

import numpy as np

import isotrain

TOKENS, LENGTH = 11, 6


def model() -> Any:
    """A bigram language model: token to logits of the next one."""
    import keras

    return keras.Sequential(
        [
            keras.Input((LENGTH,), dtype="int32"),
            keras.layers.Embedding(TOKENS, 8),
            keras.layers.Dense(TOKENS),
        ]
    )


def data() -> tuple[np.ndarray, np.ndarray]:
    """Texts of different lengths, padded with 0; targets are the tokens one later."""
    random = np.random.default_rng(0)
    texts = random.integers(1, TOKENS, size=(44, LENGTH + 1))
    lengths = random.integers(2, LENGTH + 2, size=44)
    texts[np.arange(LENGTH + 1) >= lengths[:, None]] = 0
    return texts[:, :-1].astype("int32"), texts[:, 1:].astype("int32")


def next_token_loss(model: Any, batch: Any) -> Any:
    """Cross-entropy of each position; padding has weight 0."""
    import keras
    from keras import ops

    texts, targets = batch
    losses = keras.losses.sparse_categorical_crossentropy(targets, model(texts), from_logits=True)
    return isotrain.weighted(losses, ops.cast(targets != 0, losses.dtype))


spec = isotrain.TrainingSpec(
    name="token_weights",
    model=model,
    data=data,
    objective=next_token_loss,
    optimizer={"name": "sgd", "lr": 0.5},
    global_batch_size=16,
    epochs=2,
    gradient_accumulation_steps=2,
)

if __name__ == "__main__":
    isotrain.run(spec, backend="torch-ddp", replicas=2)
