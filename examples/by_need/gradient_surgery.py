"""How do I change the gradients of each step, as adaptive gradient clipping does?

`gradients` is a function of the mean gradients over the global batch, so it does the same on any number of
replicas, and `clip` comes after it. A function of three parameters gets the weights too.

    python examples/by_need/gradient_surgery.py
"""

from __future__ import annotations

from typing import Any

import numpy as np

import isotrain


def model() -> Any:
    """A small classifier of 8 features into 3 classes."""
    import keras

    return keras.Sequential(
        [
            keras.Input((8,)),
            keras.layers.Dense(16, activation="tanh", name="hidden"),
            keras.layers.Dense(3, name="head"),
        ]
    )


def data() -> isotrain.DataSet:
    """Points of three clusters; the last global batch of an epoch is smaller."""
    random = np.random.default_rng(0)
    labels = random.integers(3, size=90)
    centers = random.normal(size=(3, 8))
    points = centers[labels] + 0.5 * random.normal(size=(90, 8))
    return isotrain.DataSet((points.astype("float32"), labels))


def adaptive_clipping(names: list[str], gradients: list[Any], weights: list[Any]) -> list[Any]:
    """Gradients of kernels, of norms up to 1/8 of those of the weights (Brock et al. 2021), unit by unit."""
    from keras import ops

    def norm(kernel: Any) -> Any:
        return ops.sqrt(ops.sum(kernel**2, axis=0, keepdims=True))

    def clipped(gradient: Any, weight: Any) -> Any:
        bound = 0.125 * ops.maximum(norm(weight), 1e-3)
        return gradient * ops.minimum(1.0, bound / ops.maximum(norm(gradient), 1e-6))

    return [
        clipped(gradient, weight) if name.endswith("kernel") else gradient
        for name, gradient, weight in zip(names, gradients, weights, strict=True)
    ]


spec = isotrain.TrainingSpec(
    name="gradient-surgery",
    model=model,
    data=data,
    loss={"name": "sparse_categorical_crossentropy", "from_logits": True},
    optimizer={"name": "sgd", "lr": 0.25, "momentum": 0.875},
    gradients=adaptive_clipping,
    clip={"global_norm": 0.25},
    global_batch_size=32,
    epochs=2,
)

if __name__ == "__main__":
    isotrain.run(spec, backend="torch-ddp", replicas=2)
