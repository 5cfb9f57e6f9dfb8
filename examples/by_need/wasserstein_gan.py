"""How do I train a Wasserstein GAN with gradient penalty, five critic steps to one of the generator?

`every: 5` lets the generator take part in each fifth step. The penalty differentiates the critic by its input
with `step.gradient`, whose result is differentiated again.

    python examples/by_need/wasserstein_gan.py
"""

from __future__ import annotations

from typing import Any

import numpy as np

import isotrain


def models() -> dict[str, Any]:
    """A generator of points of the plane from noise, and a critic of points."""
    import keras
    from keras import layers

    generator = [keras.Input((4,)), layers.Dense(16, activation="relu"), layers.Dense(2)]
    critic = [keras.Input((2,)), layers.Dense(16, activation="softplus"), layers.Dense(1)]
    return {"generator": keras.Sequential(generator), "critic": keras.Sequential(critic)}


def data() -> isotrain.DataSet:
    """Noise and the place between a generated and a real point as inputs, points on a circle as targets."""
    random = np.random.default_rng(0)
    angles = random.uniform(0, 2 * np.pi, 160)
    inputs = {
        "noise": random.normal(size=(160, 4)).astype("float32"),
        "place": random.uniform(size=(160, 1)).astype("float32"),
    }
    return isotrain.DataSet(
        (inputs, np.stack([np.cos(angles), np.sin(angles)], 1).astype("float32"))
    )


def critic_loss(models: Any, batch: Any, step: isotrain.StepContext) -> Any:
    """Loss of each pair of points: the critic's difference, and the penalty between them."""
    from keras import ops

    inputs, real = batch
    critic = models["critic"]
    generated = ops.stop_gradient(models["generator"](inputs["noise"]))
    slope = step.gradient(critic, real + inputs["place"] * (generated - real))
    penalty = (ops.norm(slope, axis=1) - 1) ** 2
    return (critic(generated) - critic(real))[:, 0] + 10 * penalty


def generator_loss(models: Any, batch: Any) -> Any:
    """Loss of each generated point."""
    inputs, _ = batch
    return -models["critic"](models["generator"](inputs["noise"]))[:, 0]


spec = isotrain.TrainingSpec(
    name="wasserstein-gan",
    model=models,
    data=data,
    optimizer={"name": "adam", "lr": 0.0009765625, "beta_1": 0.0, "beta_2": 0.875},
    updates={
        "critic": {"objective": critic_loss, "weights": "critic/*"},
        "generator": {"objective": generator_loss, "weights": "generator/*", "every": 5},
    },
    global_batch_size=16,
    epochs=2,
)

if __name__ == "__main__":
    result = isotrain.run(spec, backend="torch-ddp", replicas=2)
    print("losses of the critic:", list(result.history.scalars["critic_loss"].values()))
