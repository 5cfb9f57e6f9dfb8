"""How do I train over slow links, with an exchange every few hundred steps (DiLoCo)?

`strategy: diloco` in the spec. Replicas take local steps, and every `every` of them an outer optimizer takes
a step with their mean change. `bits` sends that in 8 or 4 bits an element.

    python examples/by_need/slow_links.py
"""

from __future__ import annotations

from typing import Any

import numpy as np

import isotrain

EVERY = 5  # of so few steps; 100 to 500 in training that takes hours


def model() -> Any:
    """A small classifier of 8 features into 3 classes."""
    import keras

    return keras.Sequential(
        [
            keras.Input((8,)),
            keras.layers.Dense(16, activation="tanh"),
            keras.layers.Dense(3),
        ]
    )


def data() -> isotrain.DataSet:
    """Points of three clusters."""
    random = np.random.default_rng(0)
    labels = random.integers(3, size=96)
    centers = random.normal(size=(3, 8))
    points = centers[labels] + 0.5 * random.normal(size=(96, 8))
    return isotrain.DataSet((points.astype("float32"), labels))


spec = isotrain.TrainingSpec(
    name="slow_links",
    model=model,
    data=data,
    loss={"name": "sparse_categorical_crossentropy", "from_logits": True},
    optimizer={"name": "sgd", "lr": 0.125, "momentum": 0.875},
    strategy={
        "name": "diloco",
        "options": {"every": EVERY, "outer_rate": 0.75, "outer_momentum": 0.875},
    },
    global_batch_size=32,
    epochs=4,
)

if __name__ == "__main__":
    result = isotrain.run(spec, backend="torch-ddp", replicas=2)
    print(f"{result.plan.exchanged_bytes_per_step:.0f} bytes sent per step and replica")
