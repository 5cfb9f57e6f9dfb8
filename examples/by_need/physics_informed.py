"""How do I train with derivatives by the inputs, as a physics-informed network or a gradient penalty does?

`step.gradient(f, x)` is the gradient of any framework. It can be differentiated again, also in evaluation.

    python examples/by_need/physics_informed.py
"""

from __future__ import annotations

from typing import Any

import numpy as np

import isotrain


def model() -> Any:
    """A function u(t) of time."""
    import keras

    return keras.Sequential(
        [keras.Input((1,)), keras.layers.Dense(16, activation="tanh"), keras.layers.Dense(1)]
    )


def data() -> np.ndarray:
    """Times from 0 to 2."""
    return np.random.default_rng(0).uniform(0, 2, size=(44, 1)).astype("float32")


def oscillator(model: Any, batch: Any, step: isotrain.StepContext) -> Any:
    """Residuals of u'' + u = 0 with u(0) = 1 and u'(0) = 0."""
    from keras import ops

    def velocity(times: Any) -> Any:
        return step.gradient(model, times)

    times, start = batch[0], ops.zeros_like(batch[0])
    acceleration = step.gradient(velocity, times)
    return {
        "equation": ops.sum((acceleration + model(times)) ** 2, axis=-1),
        "start": ops.sum((model(start) - 1) ** 2 + velocity(start) ** 2, axis=-1),
    }


spec = isotrain.TrainingSpec(
    name="physics_informed",
    model=model,
    data=data,
    objective=oscillator,
    optimizer={"name": "sgd", "lr": 0.03125},
    global_batch_size=16,
    epochs=2,
)

if __name__ == "__main__":
    isotrain.run(spec, backend="torch-ddp", replicas=2)
