"""keras.io's "Variational autoencoder", on any backend: two losses, which on keras.io a `train_step` adds.

isotrain run examples/familiar/vae.py:spec --backend tf-mirrored --replicas 2
"""

from __future__ import annotations

from typing import Any

import numpy as np

import isotrain

LENGTH = 16


def model(latent: int = 2) -> Any:
    """Autoencoder from samples to their reconstructions, and mean and log-variance of their codes."""
    import keras
    from keras import layers, ops

    class Sampling(layers.Layer):
        """Draws a code from its distribution."""

        def __init__(self) -> None:
            super().__init__()
            self.seeds = keras.random.SeedGenerator(1337)

        def call(self, inputs: Any) -> Any:
            mean, log_variance = inputs
            noise = keras.random.normal(ops.shape(mean), seed=self.seeds)
            return mean + ops.exp(0.5 * log_variance) * noise

    inputs = keras.Input((LENGTH,))
    x = layers.Dense(16, activation="relu")(inputs)
    mean, log_variance = layers.Dense(latent)(x), layers.Dense(latent)(x)
    code = Sampling()([mean, log_variance])
    x = layers.Dense(16, activation="relu")(code)
    return keras.Model(inputs, [layers.Dense(LENGTH, activation="sigmoid")(x), mean, log_variance])


def both_losses(model: Any, batch: tuple[Any, Any]) -> Any:
    """The loss of the `train_step` on keras.io, shape [samples]."""
    import keras
    from keras import ops

    inputs, _ = batch
    made, mean, log_variance = model(inputs)
    reconstruction = LENGTH * keras.losses.binary_crossentropy(inputs, made)
    divergence = -0.5 * (1 + log_variance - ops.square(mean) - ops.exp(log_variance))
    return reconstruction + ops.sum(divergence, axis=1)


def data(samples: int = 128) -> isotrain.DataSet:
    """Bits that depend on each other: of each half, all are alike but for noise."""
    random = np.random.default_rng(0)
    halves = np.repeat(random.integers(2, size=(samples, 2)), LENGTH // 2, axis=1)
    flipped = random.random(halves.shape) < 0.05
    return isotrain.DataSet((np.where(flipped, 1 - halves, halves).astype("float32"),))


spec = isotrain.TrainingSpec(
    name="vae",
    model=model,
    data=data,
    objective=both_losses,
    optimizer={"name": "adam", "lr": 0.01},
    global_batch_size=32,
    epochs=6,
)
