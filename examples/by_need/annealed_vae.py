"""How do I change a number of the loss from step to step, as the weight of a VAE's KL term?

`values` in the spec gives objectives a number for each step; the two losses are recorded by their names.

    python examples/by_need/annealed_vae.py
"""

from __future__ import annotations

from typing import Any

import numpy as np

import isotrain

LATENT = 2


def model() -> Any:
    """A variational autoencoder: from features and noise to reconstruction, mean and log variance."""
    import keras

    inputs, noise = keras.Input((8,), name="inputs"), keras.Input((LATENT,), name="noise")
    hidden = keras.layers.Dense(16, activation="tanh")(inputs)
    mean, log_variance = keras.layers.Dense(LATENT)(hidden), keras.layers.Dense(LATENT)(hidden)
    latent = mean + keras.ops.exp(log_variance / 2) * noise
    decoded = keras.layers.Dense(16, activation="tanh")(latent)
    return keras.Model([inputs, noise], [keras.layers.Dense(8)(decoded), mean, log_variance])


def data() -> tuple[np.ndarray, np.ndarray]:
    """Samples on a plane, and noise that belongs to them: in the place of targets."""
    random = np.random.default_rng(0)
    samples = random.normal(size=(60, LATENT)) @ random.normal(size=(LATENT, 8))
    return samples.astype("float32"), random.normal(size=(60, LATENT)).astype("float32")


def evidence_bound(model: Any, batch: Any, step: isotrain.StepContext) -> Any:
    """Reconstruction error and KL divergence, one value per sample each."""
    from keras import ops

    inputs, noise = batch
    reconstruction, mean, log_variance = model([inputs, noise])
    divergence = ops.sum(mean**2 + ops.exp(log_variance) - 1 - log_variance, axis=-1) / 2
    return {
        "reconstruction": ops.sum((reconstruction - inputs) ** 2, axis=-1),
        "divergence": step.values["beta"] * divergence,
    }


spec = isotrain.TrainingSpec(
    name="annealed_vae",
    model=model,
    data=data,
    objective=evidence_bound,
    values={"beta": {"name": "linear", "start": 0.0, "end": 1.0, "steps": 8}},
    optimizer={"name": "sgd", "lr": 0.03125},
    global_batch_size=16,
    epochs=3,
)

if __name__ == "__main__":
    isotrain.run(spec, backend="torch-ddp", replicas=2)
