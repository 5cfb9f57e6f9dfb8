"""How do I train a model whose layers are too wide for one device (tensor parallelism)?

Strategy `tensor` cuts layers over the processes of a replica: some units of each, some heads, some words of
the vocabulary. The loss is computed from each process's logits; no process has all of them.

    python examples/by_need/cut_layers.py
"""

from __future__ import annotations

from typing import Any

import numpy as np

import isotrain

BACKENDS = ("torch-ddp", "tf-multiworker", "horovod-torch", "horovod-tf")


def model() -> Any:
    """A small language model, of 16 words: all its layers with weights are cut."""
    import keras

    tokens = keras.Input((6,), dtype="int32")
    x = keras.layers.Embedding(16, 8, name="words")(tokens)
    x = x + keras.layers.MultiHeadAttention(4, 2, name="attention")(x, x)
    hidden = keras.layers.Dense(32, activation="silu", name="up")(x)
    x = x + keras.layers.Dense(8, name="down")(hidden)
    return keras.Model(tokens, keras.layers.Dense(16, name="next")(x))


def data() -> isotrain.DataSet:
    """Texts that count words by steps of 1 to 3, and the word that follows each of theirs."""
    first, by = np.random.default_rng(0).integers([0, 1], [16, 4], size=(96, 2)).T[:, :, None]
    texts = ((first + by * np.arange(7)) % 16).astype("int32")
    return isotrain.DataSet((texts[:, :-1], texts[:, 1:]))


spec = isotrain.TrainingSpec(
    name="cut_layers",
    model=model,
    data=data,
    loss={"name": "sparse_categorical_crossentropy", "from_logits": True},
    metrics=["accuracy"],
    optimizer={"name": "sgd", "lr": 0.0625, "momentum": 0.875},
    strategy={"name": "tensor", "options": {"degree": 2}},
    global_batch_size=32,
    epochs=2,
)

if __name__ == "__main__":
    isotrain.run(spec, backend="torch-ddp", replicas=2)  # four processes
