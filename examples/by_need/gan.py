"""How do I train a GAN, whose generator and discriminator take turns?

Return both models as a dict, and give each an update: its objective, its weights and its optimizer.
With each batch the discriminator learns first, then the generator against the new discriminator.

    python examples/by_need/gan.py
"""

from __future__ import annotations

from typing import Any

import numpy as np

import isotrain


def models() -> dict[str, Any]:
    """A generator of 8 x 8 images from noise, and a discriminator of real and generated images (DCGAN)."""
    import keras

    generator = keras.Sequential(
        [
            keras.Input((16,)),
            keras.layers.Dense(4 * 4 * 8, activation="relu"),
            keras.layers.Reshape((4, 4, 8)),
            keras.layers.Conv2DTranspose(1, 4, strides=2, padding="same", activation="tanh"),
        ]
    )
    discriminator = keras.Sequential(
        [
            keras.Input((8, 8, 1)),
            keras.layers.Conv2D(8, 3, strides=2, padding="same", activation="relu"),
            keras.layers.Flatten(),
            keras.layers.Dense(1),
        ]
    )
    return {"generator": generator, "discriminator": discriminator}


def data() -> isotrain.DataSet:
    """Noise as inputs, and blobs as the real images to imitate."""
    random = np.random.default_rng(0)
    axis = np.linspace(-1, 1, 8)
    blobs = np.exp(-4 * (axis[:, None, None] ** 2 + axis[:, None] ** 2)) * random.uniform(
        0.5, 1, (64, 1, 1, 1)
    )
    return isotrain.DataSet(
        (random.normal(size=(64, 16)).astype("float32"), blobs.astype("float32"))
    )


def discriminator_loss(models: Any, batch: Any) -> Any:
    """Loss of each pair of a generated and a real image, as far as they are mistaken for each other."""
    from keras import ops

    noise, real = batch
    generated = models["discriminator"](models["generator"](noise))
    return ops.softplus(generated)[:, 0] + ops.softplus(-models["discriminator"](real))[:, 0]


def generator_loss(models: Any, batch: Any) -> Any:
    """Loss of each generated image, as far as it is not taken for a real one."""
    from keras import ops

    return ops.softplus(-models["discriminator"](models["generator"](batch[0])))[:, 0]


spec = isotrain.TrainingSpec(
    name="gan",
    model=models,
    data=data,
    updates={
        "discriminator": {
            "objective": discriminator_loss,
            "weights": "discriminator/*",
            "optimizer": {"name": "sgd", "lr": 0.0625},
        },
        "generator": {
            "objective": generator_loss,
            "weights": "generator/*",
            "optimizer": {"name": "sgd", "lr": 0.125, "momentum": 0.5},
        },
    },
    global_batch_size=16,
    epochs=2,
)

if __name__ == "__main__":
    result = isotrain.run(spec, backend="torch-ddp", replicas=2)
    print("losses of the generator:", list(result.history.scalars["generator_loss"].values()))
