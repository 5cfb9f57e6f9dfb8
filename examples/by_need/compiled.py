"""How do I compile the model?

`compile: true` hands the model to the framework's compiler: `torch.compile`, or XLA in TensorFlow.

    python examples/by_need/compiled.py
"""

from __future__ import annotations

from typing import Any

import numpy as np

import isotrain


def model() -> Any:
    """A small classifier of 8 features into 3 classes."""
    import keras

    return keras.Sequential(
        [keras.Input((8,)), keras.layers.Dense(16, activation="tanh"), keras.layers.Dense(3)]
    )


def data() -> isotrain.DataSet:
    """Points of three clusters."""
    random = np.random.default_rng(0)
    labels = random.integers(3, size=96)
    return isotrain.DataSet(
        ((random.normal(size=(96, 8)) + labels[:, None]).astype("float32"), labels)
    )


spec = isotrain.TrainingSpec(
    name="compiled",
    model=model,
    data=data,
    loss={"name": "sparse_categorical_crossentropy", "from_logits": True},
    optimizer={"name": "sgd", "lr": 0.125},
    compile=True,
    global_batch_size=32,
    epochs=2,
)

if __name__ == "__main__":
    isotrain.run(spec, backend="tf-mirrored", replicas=2)
