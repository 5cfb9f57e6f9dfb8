"""The models in `torch.nn`; images are `[samples, channels, rows, columns]`."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

from benchmarks.peers.workloads import CLASSES, VOCABULARY, Workload, start_value


def build(workload: Workload) -> nn.Module:
    """Builds a workload's model with the initial weights that all contenders start from."""
    makers = {"mlp": lambda: Mlp(workload.width), "cnn": Cnn, "transformer": Transformer}
    model: nn.Module = (makers | {"resnet_50": ResNet50})[workload.function]()
    set_weights(model)
    return model


def set_weights(model: nn.Module) -> None:
    """Sets the initial weights of a model, by the names of its layers."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1:
                _set_kernel(parameter, name.rpartition(".")[0].replace(".", "_"))
            elif name.endswith("bias"):
                parameter.zero_()


def _set_kernel(parameter: nn.Parameter, layer: str) -> None:
    """Keras keeps `[rows, columns, inputs, outputs]` and `[inputs, outputs]`."""
    if parameter.dim() == 4:
        shape = tuple(parameter.shape[i] for i in (2, 3, 1, 0))
        value = torch.from_numpy(start_value(layer, shape)).permute(3, 2, 0, 1)
    elif "embedding" in layer:
        value = torch.from_numpy(start_value(layer, tuple(parameter.shape)))
    else:
        value = torch.from_numpy(start_value(layer, tuple(parameter.shape[::-1]))).T
    parameter.copy_(value)


class Mlp(nn.Module):
    """Two hidden layers."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.hidden0 = nn.Linear(64, width)
        self.hidden1 = nn.Linear(width, width)
        self.head = nn.Linear(width, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.relu(self.hidden1(torch.relu(self.hidden0(x)))))


class Cnn(nn.Module):
    """Two convolutions with pooling."""

    def __init__(self) -> None:
        super().__init__()
        self.conv0 = nn.Conv2d(3, 16, 3, padding=1)
        self.conv1 = nn.Conv2d(16, 32, 3, padding=1)
        self.head = nn.Linear(32, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = functional.max_pool2d(torch.relu(self.conv0(x)), 2)
        x = functional.max_pool2d(torch.relu(self.conv1(x)), 2)
        return self.head(x.mean((2, 3)))


class Attention(nn.Module):
    """Self-attention of four heads."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.query = nn.Linear(width, width)
        self.key = nn.Linear(width, width)
        self.value = nn.Linear(width, width)
        self.attention_output = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        query, key, value = (
            layer(x).unflatten(-1, (4, -1)).transpose(1, 2)
            for layer in (self.query, self.key, self.value)
        )
        mixed = functional.scaled_dot_product_attention(query, key, value)
        return self.attention_output(mixed.transpose(1, 2).flatten(2))


class Block(nn.Module):
    """Attention and two dense layers, each after a normalisation."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm0 = nn.LayerNorm(width)
        self.attention = Attention(width)
        self.norm1 = nn.LayerNorm(width)
        self.dense0 = nn.Linear(width, 2 * width)
        self.dense1 = nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norm0(x))
        return x + self.dense1(torch.relu(self.dense0(self.norm1(x))))


class Transformer(nn.Module):
    """Two blocks over embedded words, and the mean over their places."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 128)
        self.block0 = Block(128)
        self.block1 = Block(128)
        self.head = nn.Linear(128, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.block1(self.block0(self.embedding(x))).mean(1))


class Bottleneck(nn.Module):
    """Three convolutions beside a shortcut."""

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv0 = nn.Conv2d(inputs, width, 1, bias=False)
        self.norm0 = nn.BatchNorm2d(width)
        self.conv1 = nn.Conv2d(width, width, 3, stride, 1, bias=False)
        self.norm1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, 4 * width, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(4 * width)
        self.shortcut: nn.Conv2d | None = None
        if stride > 1 or inputs != 4 * width:
            self.shortcut = nn.Conv2d(inputs, 4 * width, 1, stride, bias=False)
            self.shortcut_norm = nn.BatchNorm2d(4 * width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.relu(self.norm0(self.conv0(x)))
        y = torch.relu(self.norm1(self.conv1(y)))
        y = self.norm2(self.conv2(y))
        beside = x if self.shortcut is None else self.shortcut_norm(self.shortcut(x))
        return torch.relu(y + beside)


class ResNet50(nn.Module):
    """The residual network of 50 layers."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 64, 7, 2, 3, bias=False)
        self.stem_norm = nn.BatchNorm2d(64)
        inputs = 64
        for stage, (blocks, width) in enumerate(((3, 64), (4, 128), (6, 256), (3, 512))):
            for block in range(blocks):
                stride = 2 if stage > 0 and block == 0 else 1
                self.add_module(f"stage{stage}_{block}", Bottleneck(inputs, width, stride))
                inputs = 4 * width
        self.head = nn.Linear(inputs, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = functional.max_pool2d(torch.relu(self.stem_norm(self.stem(x))), 3, 2, 1)
        for module in self.children():
            if isinstance(module, Bottleneck):
                x = module(x)
        return self.head(x.mean((2, 3)))
