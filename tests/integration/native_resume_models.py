"""What goes on from another run with native models: their own dropout, optimizers and loss scale."""

from __future__ import annotations

from typing import Any

import numpy as np

SAMPLES = 22


def noisy() -> Any:
    """A module that draws from torch's generator and from one of its own, and moves a statistic."""
    import torch  # here: processes of TensorFlow import the tests of both

    class Noisy(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.hidden = torch.nn.Linear(4, 40)
            self.register_buffer("running_mean", torch.zeros(40))
            self.dropout = torch.nn.Dropout(0.5)
            self.head = torch.nn.Linear(40, 3)
            self.draws = torch.Generator().manual_seed(7)

        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            hidden = self.dropout(torch.tanh(self.hidden(inputs) - self.running_mean))
            if self.training:
                with torch.no_grad():
                    self.running_mean.lerp_(hidden.mean(0), 0.25)
                hidden = hidden + 0.1 * torch.rand(hidden.shape, generator=self.draws)
            return self.head(hidden)

    return Noisy()


def counting(parameters: Any, rate: float) -> Any:
    """Gradient descent that keeps a number for all weights, and for each a number and a momentum."""
    import torch

    class Counting(torch.optim.Optimizer):
        def __init__(self, params: Any, lr: float) -> None:
            super().__init__(params, {"lr": lr, "steps": 0, "scale": 1.0})

        @torch.no_grad()
        def step(self, closure: Any = None) -> None:
            for group in self.param_groups:
                group["steps"] += 1
                group["scale"] /= 1.1
                for weight in group["params"]:
                    if weight.grad is None:
                        continue
                    state = self.state[weight]
                    momentum = state.setdefault("momentum", torch.zeros_like(weight))
                    state["count"] = state.get("count", 0) + 1
                    momentum.mul_(1 - 1 / (1 + state["count"])).add_(weight.grad)
                    weight.sub_(momentum * (group["lr"] * group["scale"]))

    return Counting(parameters, rate)


def data() -> tuple[np.ndarray, np.ndarray]:
    generator = np.random.default_rng(2)
    inputs = generator.normal(size=(SAMPLES, 4))
    return inputs, np.sin(inputs[:, :3])


def spec(**changes: Any) -> dict[str, Any]:
    return {
        "model": {"torch": noisy},
        "data": data,
        "loss": "mean_squared_error",
        "metrics": ["mean_absolute_error", "mean_squared_error"],
        "optimizer": {"name": "adam", "lr": 2.0**-5},
        "global_batch_size": 7,
        "epochs": 2,
        "seed": 3,
        **changes,
    }
