"""How do I meta-learn with MAML, whose loss is that after a step of gradient descent?

The objective adapts a copy of the weights to each task, and returns the losses of the adapted copies.
(Finn et al., "Model-agnostic meta-learning", ICML 2017.)

    python examples/by_need/maml.py
"""

from __future__ import annotations

from typing import Any

import numpy as np

import isotrain

ADAPTATION_RATE, SHOTS = 0.125, 5


def model() -> Any:
    """A function of one variable."""
    import keras

    return keras.Sequential(
        [keras.Input((1,)), keras.layers.Dense(16, activation="tanh"), keras.layers.Dense(1)]
    )


def data() -> isotrain.DataSet:
    """Tasks, one per sample: points of a sine with an amplitude and a phase of its own."""
    random = np.random.default_rng(0)
    amplitude, phase = random.uniform(0.5, 2, (40, 1, 1)), random.uniform(0, 3, (40, 1, 1))
    points = random.uniform(-3, 3, (40, 2 * SHOTS, 1))
    values = amplitude * np.sin(points + phase)
    return isotrain.DataSet((points.astype("float32"), values.astype("float32")))


def call(weights: list[Any], points: Any) -> Any:
    """The model's output with these weights in place of its own."""
    from keras import ops

    kernel_1, bias_1, kernel_2, bias_2 = weights
    return ops.matmul(ops.tanh(ops.matmul(points, kernel_1) + bias_1), kernel_2) + bias_2


def adapted_losses(model: Any, batch: Any, step: isotrain.StepContext) -> Any:
    """Losses on the second half of each task's points, after one step on the first half."""
    from keras import ops

    points, values = batch
    tasks = ops.shape(points)[0]
    # Each task has weights of its own: shape [tasks, ...].
    weights = [ops.repeat(ops.convert_to_tensor(w)[None], tasks, axis=0) for w in model.weights]
    weights = [w[:, None, :] if len(w.shape) == 2 else w for w in weights]

    def loss(own: list[Any], part: slice) -> Any:
        return ops.mean((call(own, points[:, part]) - values[:, part]) ** 2, axis=(1, 2))

    gradients = step.gradient(lambda own: loss(own, slice(None, SHOTS)), weights)
    adapted = [w - ADAPTATION_RATE * g for w, g in zip(weights, gradients, strict=True)]
    return loss(adapted, slice(SHOTS, None))


spec = isotrain.TrainingSpec(
    name="maml",
    model=model,
    data=data,
    objective=adapted_losses,
    optimizer={"name": "sgd", "lr": 0.125},
    global_batch_size=16,
    epochs=2,
)

if __name__ == "__main__":
    isotrain.run(spec, backend="torch-ddp", replicas=2)
