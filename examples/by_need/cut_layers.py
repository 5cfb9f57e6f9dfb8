"""How do I train a model whose layers are too wide for one device (tensor parallelism)?

Strategy `tensor` cuts layers over the processes of a replica: some units of each, some heads, some rows.

    python examples/by_need/cut_layers.py
"""

from __future__ import annotations

from typing import Any

import numpy as np

import isotrain

BACKENDS = ("torch-ddp", "tf-multiworker", "horovod-torch", "horovod-tf")


def model() -> Any:
    """A classifier of short texts: of its layers, only the last one stays whole."""
    import keras

    tokens = keras.Input((6,), dtype="int32")
    x = keras.layers.Embedding(16, 8, name="words")(tokens)
    x = x + keras.layers.MultiHeadAttention(4, 2, name="attention")(x, x)
    hidden = keras.layers.Dense(32, activation="silu", name="up")(x)
    x = x + keras.layers.Dense(8, name="down")(hidden)
    x = keras.layers.GlobalAveragePooling1D()(x)
    return keras.Model(tokens, keras.layers.Dense(2, name="classes")(x))


def data() -> isotrain.DataSet:
    """Texts whose class is whether their first word is a rare one."""
    texts = np.random.default_rng(0).integers(16, size=(96, 6)).astype("int32")
    return isotrain.DataSet((texts, (texts[:, 0] >= 8).astype("int64")))


spec = isotrain.TrainingSpec(
    name="cut_layers",
    model=model,
    data=data,
    loss={"name": "sparse_categorical_crossentropy", "from_logits": True},
    optimizer={"name": "sgd", "lr": 0.0625, "momentum": 0.875},
    strategy={"name": "tensor", "options": {"degree": 2}},
    global_batch_size=32,
    epochs=2,
)

if __name__ == "__main__":
    isotrain.run(spec, backend="torch-ddp", replicas=2)  # four processes
