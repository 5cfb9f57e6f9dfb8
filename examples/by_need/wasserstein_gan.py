"""How do I train a Wasserstein GAN with gradient penalty, five critic steps to one of the generator?

`every: 5` lets the generator take part in each fifth step. The penalty differentiates the critic by its input
with `torch.autograd.grad`, whose result is differentiated again.

    python examples/by_need/wasserstein_gan.py
"""

from __future__ import annotations

from typing import Any

import numpy as np

import isotrain

BACKENDS = ("torch-ddp", "horovod-torch")


def models() -> dict[str, Any]:
    """A generator of points of the plane from noise, and a critic of points."""
    from torch import nn

    return {
        "generator": nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 2)),
        "critic": nn.Sequential(nn.Linear(2, 16), nn.Softplus(), nn.Linear(16, 1)),
    }


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


def critic_loss(models: Any, batch: Any) -> Any:
    """Loss of each pair of points: the critic's difference, and the penalty between them."""
    import torch

    inputs, real = batch
    critic = models["critic"]
    generated = models["generator"](inputs["noise"]).detach()
    between = (real + inputs["place"] * (generated - real)).requires_grad_()
    (slope,) = torch.autograd.grad(critic(between).sum(), between, create_graph=True)
    penalty = (slope.norm(dim=1) - 1) ** 2
    return (critic(generated) - critic(real))[:, 0] + 10 * penalty


def generator_loss(models: Any, batch: Any) -> Any:
    """Loss of each generated point."""
    inputs, _ = batch
    return -models["critic"](models["generator"](inputs["noise"]))[:, 0]


spec = isotrain.TrainingSpec(
    name="wasserstein-gan",
    model={"torch": models},
    data=data,
    optimizer={"name": "adam", "lr": 0.001, "beta_1": 0.0},
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
