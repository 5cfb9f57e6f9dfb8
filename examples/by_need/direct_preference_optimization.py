"""How do I train on preferences against a frozen reference (DPO)?

The reference is the model at the start. Its log-probabilities of all pairs are computed once, by
`session.call` before the first step, and travel with the targets.

    python examples/by_need/direct_preference_optimization.py
"""

from __future__ import annotations

from typing import Any

import numpy as np

import isotrain

PAIRS, LENGTH, TOKENS, STEPS, BETA = 9, 5, 6, 6, 0.5


def model() -> Any:
    """Logits of the next token at each place of a text, shape `[texts, LENGTH - 1, TOKENS]`."""
    import keras

    return keras.Sequential(
        [
            keras.Input((LENGTH - 1,), dtype="int32"),
            keras.layers.Embedding(TOKENS, 8),
            keras.layers.Dense(8, "tanh"),
            keras.layers.Dense(TOKENS),
        ]
    )


def pairs() -> tuple[np.ndarray, np.ndarray]:
    """Preferred and rejected texts, int32 `[pairs, LENGTH]`: rising tokens are preferred."""
    random = np.random.default_rng(0)
    texts = random.integers(TOKENS, size=(2, PAIRS, LENGTH)).astype("int32")
    return np.sort(texts[0]), texts[1]


def log_probability(model: Any, texts: Any) -> Any:
    """Log-probabilities of texts, shape `[texts]`."""
    from keras import ops

    log_probabilities = ops.log_softmax(model(texts[:, :-1]))
    one_hot = ops.one_hot(texts[:, 1:], TOKENS, dtype=log_probabilities.dtype)
    return ops.sum(one_hot * log_probabilities, (1, 2))


def objective(model: Any, batch: Any) -> Any:
    """Losses of pairs, shape `[pairs]` (Rafailov et al. 2023)."""
    from keras import ops

    (preferred, rejected), reference = batch
    margin = log_probability(model, preferred) - log_probability(model, rejected) - reference
    return ops.softplus(-BETA * margin)


def reference_margins(ask: Any, preferred: np.ndarray, rejected: np.ndarray) -> np.ndarray:
    """Differences of the log-probabilities by the model as it is now, shape `[pairs]`."""

    def total(texts: np.ndarray) -> np.ndarray:
        logits = ask(texts[:, :-1])
        logits = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
        chosen: np.ndarray = np.take_along_axis(logits, texts[:, 1:, None].astype("int64"), -1)
        return chosen.sum((1, 2))

    return total(preferred) - total(rejected)


def train(session: isotrain.Session) -> None:
    """Trains on this process's pairs."""
    preferred, rejected = map(session.local_rows, pairs())
    margins = reference_margins(session.call, preferred, rejected)
    while not session.is_done:
        session.step(session.batch((preferred, rejected), margins))


spec = isotrain.TrainingSpec(
    name="direct-preference-optimization",
    model=model,
    objective=objective,
    optimizer={"name": "sgd", "lr": 0.125},
    global_batch_size=PAIRS,
    steps=STEPS,
)

if __name__ == "__main__":
    isotrain.launch(train, spec, backend="torch-ddp", replicas=2)
