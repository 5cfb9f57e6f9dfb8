"""Models with a part that is not to train: a teacher with dropout and batch normalisation."""

from __future__ import annotations

from typing import Any

import numpy as np

import isotrain

RATE, NONE = 0.9, 1e-7
SAMPLES = np.random.default_rng(3).normal(size=(15, 3)).astype("float32")


def samples() -> isotrain.DataSet:
    return isotrain.DataSet((SAMPLES, SAMPLES[:, :1]))


def pair(drop: float, *, mode: str = "train") -> Any:
    """A student and a teacher.

    Args:
        drop: How much the teacher drops.
        mode: What the function does: `eval` puts the teacher into evaluation mode and freezes it, `norm` its
            batch normalisation; `awake` puts all of it, and `whole` the whole model, into evaluation mode,
            with weights to train.
    """
    import torch
    from torch import nn

    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.student = nn.Linear(3, 2)
            self.teacher = nn.Sequential(
                nn.Linear(3, 8), nn.BatchNorm1d(8), nn.Dropout(drop), nn.Linear(8, 2)
            )

        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            return (self.student(inputs) - self.teacher(inputs)).square().mean(1, keepdim=True)

    model = Pair()
    if mode == "eval":
        model.teacher.eval().requires_grad_(False)
    elif mode == "norm":
        model.teacher[1].eval().requires_grad_(False)
    elif mode == "awake":
        model.teacher.eval()
    elif mode == "whole":
        model.eval()
    return model


def layers(drop: float) -> Any:
    import keras

    keras.utils.set_random_seed(2)
    inputs = keras.Input((3,))
    teacher = keras.Sequential(
        [
            keras.Input((3,)),
            keras.layers.Dense(8),
            keras.layers.BatchNormalization(),
            keras.layers.Dropout(drop, seed=1),
            keras.layers.Dense(2),
        ],
        name="teacher",
    )
    gap = keras.layers.Dense(2, name="student")(inputs) - teacher(inputs)
    return keras.Model(inputs, keras.ops.mean(gap**2, axis=1, keepdims=True))


def gap(model: Any, batch: Any) -> Any:
    return model(batch[0])[:, 0]


COMMON: dict[str, Any] = {
    "data": samples,
    "objective": gap,
    "optimizer": {"name": "sgd", "lr": 2.0**-4},
    "global_batch_size": 5,  # which two replicas do not share evenly
    "epochs": 2,
    "threads": 1,
}
FROZEN = {"freeze": "teacher*"}
NATIVE: dict[str, dict[str, Any]] = {
    "left in evaluation": {"model_args": {"mode": "eval"}},
    "frozen": {"initial_weights": FROZEN},
    "norm left in evaluation": {"model_args": {"mode": "norm"}},
    "to be trained, in evaluation": {"model_args": {"mode": "awake"}},
    "all in evaluation": {"model_args": {"mode": "whole"}},
}


def spec(name: str, drop: float) -> dict[str, Any]:
    changes = NATIVE[name]
    args = {"drop": drop, **changes.get("model_args", {})}
    return {**COMMON, "model": {"torch": pair}, **changes, "model_args": args}


def portable(drop: float, **changes: Any) -> dict[str, Any]:
    args = {"drop": drop}
    return {**COMMON, "model": layers, "model_args": args, "initial_weights": FROZEN, **changes}


def trained(session: isotrain.Session, name: str) -> dict[str, Any]:
    """State before and after training, and what the plan says of the model."""
    weights = ("trainable", "non-trainable")
    before = session.read_state(weights)
    for batch in session.batches():
        session.step(batch)
    told = [each for each in session.setup_notes() if each.startswith("model: ")]
    return {"before": before, "after": session.read_state(weights), "told": told}
