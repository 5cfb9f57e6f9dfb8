"""How do I normalise over the whole global batch, and not over each replica's part of it?

`batch_norm: global` sums the statistics over the replicas. The result is then that of one replica, for native
models of torch too. Keras has `synchronized=True` on TensorFlow only, and torch `SyncBatchNorm` on GPUs only.

    python examples/by_need/batch_norm_over_replicas.py
"""

from __future__ import annotations

from typing import Any

import numpy as np

import isotrain

BACKENDS = ("torch-ddp", "tf-mirrored", "tf-multiworker", "horovod-torch", "horovod-tf")


def model() -> Any:
    """A small classifier with batch normalisation."""
    import keras

    return keras.Sequential(
        [
            keras.Input((8,)),
            keras.layers.Dense(16),
            keras.layers.BatchNormalization(),
            keras.layers.Activation("tanh"),
            keras.layers.Dense(3),
        ]
    )


def data() -> isotrain.DataSet:
    """Points of three clusters."""
    random = np.random.default_rng(0)
    labels = random.integers(3, size=96)
    return isotrain.DataSet(
        ((random.normal(size=(96, 8)) + labels[:, None]).astype("float32"), labels)
    )


spec = isotrain.TrainingSpec(
    name="batch-norm-over-replicas",
    model=model,
    data=data,
    loss={"name": "sparse_categorical_crossentropy", "from_logits": True},
    optimizer={"name": "sgd", "lr": 0.125},
    batch_norm="global",
    global_batch_size=32,
    epochs=2,
)

if __name__ == "__main__":
    isotrain.run(spec, backend="tf-mirrored", replicas=2)
