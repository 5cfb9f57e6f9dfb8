"""How a torch backend builds the spec's model."""

from __future__ import annotations

from typing import Any

import torch

from isotrain.adapters.torch.trainer.build import build_trainer
from isotrain.plugin import TrainingSpec


def test_a_native_model_draws_its_weights_on_the_cpu() -> None:
    """A seed gives the same initial weights whatever device trains them; `meta` stands for a GPU."""
    devices: list[torch.device] = []

    def model() -> Any:
        devices.append(torch.empty(1).device)
        return torch.nn.Linear(2, 1)

    spec = TrainingSpec(
        model={"torch": model},
        data=dict,
        loss="mse",
        optimizer={"name": "sgd", "lr": 0.5},
        global_batch_size=2,
        steps=1,
    )
    trainer = build_trainer(spec, torch.device("meta"))
    assert [device.type for device in devices] == ["cpu"]
    assert {weight.device.type for weight in trainer.trainable.values()} == {"meta"}
