"""How do I train with L-BFGS, which computes the loss several times in a step?

A custom torch optimizer whose `step` needs a closure gets one: each call is a pass over the global batch on
all replicas, whose gradients and loss are the means. Native torch models only: Keras has no such optimizer.

    python examples/by_need/lbfgs.py
"""

from __future__ import annotations

from typing import Any

import numpy as np

import isotrain

BACKENDS = ("torch-ddp", "horovod-torch")


def model() -> Any:
    """A small regression from 4 features."""
    from torch import nn

    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))


def lbfgs(parameters: Any, lr: float) -> Any:
    """L-BFGS with a line search, a few iterations per step."""
    import torch

    return torch.optim.LBFGS(
        parameters, lr, max_iter=4, history_size=4, line_search_fn="strong_wolfe"
    )


def data() -> isotrain.DataSet:
    """A smooth function of 4 numbers; each step sees all of them."""
    inputs = np.random.default_rng(0).normal(size=(30, 4)).astype("float32")
    return isotrain.DataSet((inputs, np.sin(inputs.sum(axis=1, keepdims=True))))


spec = isotrain.TrainingSpec(
    name="lbfgs",
    model={"torch": model},
    data=data,
    loss="mse",
    optimizer={"custom": lbfgs, "lr": 1.0},
    global_batch_size=30,
    steps=4,
    shuffle=False,
)

if __name__ == "__main__":
    isotrain.run(spec, backend="torch-ddp", replicas=2)
