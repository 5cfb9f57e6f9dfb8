"""A GAN in miniature whose two parts are trained by turns, and the plain torch program for it."""

from __future__ import annotations

from typing import Any

import numpy as np

import isotrain

EPOCHS, BATCH = 2, 8


def portable() -> Any:
    """A Keras model with the parts `g` and `d`."""
    import keras

    class Pair(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.g = part("g", 3, 4)
            self.d = part("d", 4, 1)
            self.built = True

    def part(name: str, inputs: int, outputs: int) -> Any:
        hidden = keras.layers.Dense(6, activation="tanh", name=f"{name}_hidden")
        return keras.Sequential(
            [keras.Input((inputs,)), hidden, keras.layers.Dense(outputs, name=f"{name}_out")],
            name=name,
        )

    return Pair()


def native() -> Any:
    from torch import nn

    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.g = nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 4))
            self.d = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 1))

    return Pair()


def samples() -> isotrain.DataSet:
    random = np.random.default_rng(0)
    train, validation = (
        (random.normal(size=(count, 3)), random.normal(size=(count, 4))) for count in (28, 10)
    )
    return isotrain.DataSet(train, validation)


def critic(model: Any, batch: Any) -> Any:
    noise, real = batch
    return (model.d(real)[:, 0] - 1) ** 2 + model.d(model.g(noise))[:, 0] ** 2


def generator(model: Any, batch: Any) -> Any:
    return (model.d(model.g(batch[0]))[:, 0] - 1) ** 2


def spec(model: Any, **changes: Any) -> dict[str, Any]:
    return {
        "model": model,
        "data": samples,
        "updates": {
            "critic": {
                "objective": critic,
                "weights": "d/*",
                "optimizer": {"name": "sgd", "lr": 0.0625, "momentum": 0.75},
                "clip": {"value": 0.125},
            },
            "generator": {
                "objective": generator,
                "weights": "g/*",
                "optimizer": {"name": "sgd", "lr": 0.125, "momentum": 0.5},
                "every": 2,
            },
        },
        "global_batch_size": BATCH,
        "epochs": EPOCHS,
        "precision": "float64",
        **changes,
    }


def train_plain(model: Any, weights: dict[str, Any], batches: list[Any]) -> None:
    """Trains a model, Keras on torch or native, in place as one would by hand."""
    import torch

    parts = {part: [w for name, w in weights.items() if name.startswith(part)] for part in "dg"}
    critics = torch.optim.SGD(parts["d"], lr=0.0625, momentum=0.75)
    generators = torch.optim.SGD(parts["g"], lr=0.125, momentum=0.5)
    for step, batch in enumerate(batches):
        critics.zero_grad()
        loss = critic(model, batch).mean()
        loss.backward()
        torch.nn.utils.clip_grad_value_(parts["d"], 0.125)
        critics.step()
        if step % 2:
            generators.zero_grad()
            generator(model, batch).mean().backward()
            generators.step()
