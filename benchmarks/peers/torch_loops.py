"""Models and objectives in torch of the workloads that need more than a model, a loss and an optimizer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from benchmarks.peers.torch_models import Block, set_weights
from benchmarks.peers.workloads import EMBEDDING, NOISE, TEMPERATURE, VOCABULARY, Workload


def build(workload: Workload) -> dict[str, nn.Module]:
    """Builds a workload's models with the initial weights that all contenders start from."""
    makers: dict[str, dict[str, Callable[[], nn.Module]]] = {
        "dcgan": {"generator": Generator, "discriminator": Discriminator},
        "clip": {"images": ImageEncoder, "texts": TextEncoder},
    }
    models = {name: make() for name, make in makers[workload.name].items()}
    for model in models.values():
        set_weights(model)
    return models


class Generator(nn.Module):
    """Transposed convolutions from noise `[samples, NOISE]` to images of 32 x 32."""

    def __init__(self) -> None:
        super().__init__()
        self.up0 = nn.ConvTranspose2d(NOISE, 128, 4, bias=False)
        self.norm0 = nn.BatchNorm2d(128)
        self.up1 = nn.ConvTranspose2d(128, 64, 4, 2, 1, bias=False)
        self.norm1 = nn.BatchNorm2d(64)
        self.up2 = nn.ConvTranspose2d(64, 32, 4, 2, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(32)
        self.up3 = nn.ConvTranspose2d(32, 3, 4, 2, 1)

    def forward(self, noise: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.norm0(self.up0(noise[:, :, None, None])))
        x = torch.relu(self.norm1(self.up1(x)))
        x = torch.relu(self.norm2(self.up2(x)))
        return torch.tanh(self.up3(x))


class Discriminator(nn.Module):
    """Convolutions from images to logits `[samples]`."""

    def __init__(self) -> None:
        super().__init__()
        self.down0 = nn.Conv2d(3, 32, 4, 2, 1)
        self.down1 = nn.Conv2d(32, 64, 4, 2, 1)
        self.down2 = nn.Conv2d(64, 128, 4, 2, 1)
        self.head = nn.Conv2d(128, 1, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in (self.down0, self.down1, self.down2):
            x = functional.leaky_relu(layer(x), 0.2)
        return self.head(x).flatten()


class ImageEncoder(nn.Module):
    """Convolutions from images to embeddings of length 1."""

    def __init__(self) -> None:
        super().__init__()
        self.conv0 = nn.Conv2d(3, 32, 3, padding=1)
        self.conv1 = nn.Conv2d(32, 64, 3, padding=1)
        self.head = nn.Linear(64, EMBEDDING)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = functional.max_pool2d(torch.relu(self.conv0(x)), 2)
        x = functional.max_pool2d(torch.relu(self.conv1(x)), 2)
        return functional.normalize(self.head(x.mean((2, 3))))


class TextEncoder(nn.Module):
    """A block of a transformer from tokens to embeddings of length 1."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 128)
        self.block0 = Block(128)
        self.head = nn.Linear(128, EMBEDDING)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.normalize(self.head(self.block0(self.embedding(x)).mean(1)))


def discriminator_loss(models: Any, batch: Any) -> torch.Tensor:
    """Losses `[samples]` of pairs of a generated and a real image, told apart."""
    noise, real = batch
    with torch.no_grad():
        generated = models["generator"](noise)
    logits = models["discriminator"](torch.cat([generated, real]))
    of_generated, of_real = logits.chunk(2)
    return functional.softplus(of_generated) + functional.softplus(-of_real)


def generator_loss(models: Any, batch: Any) -> torch.Tensor:
    """Losses `[samples]` of generated images, taken for real ones."""
    return functional.softplus(-models["discriminator"](models["generator"](batch[0])))


def contrastive_loss(models: Any, batch: Any, step: Any) -> torch.Tensor:
    """Losses `[samples]` of pairs of an image and a text among all of the global batch."""
    pairs = torch.cat([models["images"](batch[0]), models["texts"](batch[1])], 1)
    all_pairs, first = step.all_gather(pairs)
    images, texts = pairs.chunk(2, 1)
    all_images, all_texts = all_pairs.chunk(2, 1)
    labels = first + torch.arange(len(pairs))
    losses = [
        functional.cross_entropy(queries @ keys.T / TEMPERATURE, labels, reduction="none")
        for queries, keys in ((images, all_texts), (texts, all_images))
    ]
    return (losses[0] + losses[1]) / 2
