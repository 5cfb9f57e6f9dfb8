"""How do I see the norm of the gradients of each layer, to find one that explodes or vanishes?

`session.gradients` gives the mean gradients over the global batch, which `session.apply_gradients` then
applies. Reading them waits for the device, so this does it in every second step. `gradient_norm: true`
records the norm of all together, without waiting.

    python examples/by_need/gradient_norm_by_layer.py
"""

from __future__ import annotations

from typing import Any

import numpy as np

import isotrain


def model() -> Any:
    """A small regression model of 8 features."""
    import keras

    hidden = keras.layers.Dense(16, activation="tanh")
    return keras.Sequential([keras.Input((8,)), hidden, keras.layers.Dense(1)])


def data() -> isotrain.DataSet:
    """Points and their distances from the origin."""
    points = np.random.default_rng(0).normal(size=(90, 8)).astype("float32")
    return isotrain.DataSet((points, np.linalg.norm(points, axis=1, keepdims=True)))


spec = isotrain.TrainingSpec(
    name="gradient-norm-by-layer",
    model=model,
    data=data,
    loss="mean_squared_error",
    optimizer={"name": "sgd", "lr": 0.0625},
    global_batch_size=32,
    epochs=2,
    loggers="tensorboard",
)


def train(session: isotrain.Session) -> None:
    """Records the gradient norm of each weight in every second step."""
    group = session.group
    names = list(group.describe_state(("trainable",)))
    for batch in session.batches():
        gradients, loss = session.gradients(batch)
        if batch.step % 2 == 0:
            norms = [np.linalg.norm(group.numpy(gradient)) for gradient in gradients[0]]
            session.log(
                {f"norm/{name}": norm for name, norm in zip(names, norms, strict=True)}, batch.step
            )
        session.apply_gradients(batch, gradients, loss)
        if batch.is_last_of_epoch:
            session.end_epoch(batch.epoch, session.metrics())


if __name__ == "__main__":
    isotrain.launch(train, spec, backend="torch-ddp", replicas=2)
