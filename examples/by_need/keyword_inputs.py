"""How do I train a model that takes its inputs by keyword, and returns several outputs?

`call` says how: in training, evaluation, predictions and exports alike. For a model that returns the
predictions alone, `call="keywords"` is enough.

    python examples/by_need/keyword_inputs.py
"""

from __future__ import annotations

from typing import Any

import numpy as np

import isotrain

TOKENS, LENGTH, CLASSES = 30, 12, 3


def model() -> Any:
    """A small encoder that is called as those of Hugging Face are."""
    import keras
    from keras import ops

    class Encoder(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = keras.layers.Embedding(TOKENS, 16)
            self.attention = keras.layers.MultiHeadAttention(2, 8)
            self.head = keras.layers.Dense(CLASSES)

        def call(self, input_ids: Any, attention_mask: Any) -> dict[str, Any]:
            hidden = self.embedding(input_ids)
            hidden = hidden + self.attention(hidden, hidden, attention_mask=attention_mask[:, None])
            weights = ops.cast(attention_mask, hidden.dtype)[..., None]
            pooled = ops.sum(hidden * weights, axis=1) / ops.sum(weights, axis=1)
            return {"logits": self.head(pooled), "hidden": hidden}

    encoder = Encoder()
    encoder(input_ids=np.zeros((1, LENGTH), int), attention_mask=np.ones((1, LENGTH), int))
    return encoder


def data() -> isotrain.DataSet:
    """Sentences of 4 to 12 tokens; the class is that of the most frequent kind of token."""
    random = np.random.default_rng(0)
    tokens = random.integers(TOKENS, size=(90, LENGTH))
    mask = (np.arange(LENGTH) < random.integers(4, LENGTH + 1, size=(90, 1))).astype(int)
    kinds = np.stack([((tokens % CLASSES == kind) * mask).sum(axis=1) for kind in range(CLASSES)])
    inputs = {"input_ids": tokens, "attention_mask": mask}
    return isotrain.DataSet(isotrain.sources.arrays(inputs=inputs, targets=kinds.argmax(axis=0)))


def call(model: Any, inputs: dict[str, Any]) -> Any:
    """Predictions of the model."""
    return model(**inputs)["logits"]


spec = isotrain.TrainingSpec(
    name="keyword-inputs",
    model=model,
    data=data,
    call=call,
    loss={"name": "sparse_categorical_crossentropy", "from_logits": True},
    optimizer={"name": "sgd", "lr": 0.125},
    global_batch_size=32,
    epochs=2,
)

if __name__ == "__main__":
    isotrain.run(spec, backend="torch-ddp", replicas=2)
