"""Weights whose gradients autograd puts into the same memory train like those whose gradients are apart."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from isotrain.testing.native_equality import trained_in_turn


def data() -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(0)
    return random.normal(size=(32, 4)), random.normal(size=(32, 3))


def summed(*, is_shared: bool) -> Any:
    """A layer whose kernel is the sum of two weights: the gradient of a sum is that of each of its terms."""
    import torch
    from torch import nn

    class Summed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            generator = torch.Generator().manual_seed(0)
            self.first, self.second = (
                nn.Parameter(torch.randn(3, 4, generator=generator)) for _ in range(2)
            )
            self.bias = nn.Parameter(torch.zeros(3))

        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            first, second = self.first, self.second
            if not is_shared:
                first, second = first * 1, second * 1  # products have gradients of their own
            return inputs @ (first.t() + second.t()) + self.bias

    return Summed()


SPEC: dict[str, Any] = {
    "data": data,
    "loss": "mse",
    "optimizer": {"name": "sgd", "lr": 0.05},
    "global_batch_size": 16,
    "epochs": 2,
    "precision": "float64",
    "threads": 1,
}
CASES: dict[str, dict[str, Any]] = {
    "clipped": {"clip": {"global_norm": 0.5}},
    "accumulated": {"gradient_accumulation_steps": 2},
    "bits": {"reproducible": {"granularity": 4}},
}


@pytest.mark.parametrize(
    ("backend", "replicas"), [("torch-ddp", 1), ("torch-ddp", 2), ("horovod-torch", 2)]
)
def test_gradients_in_the_same_memory_count_once(backend: str, replicas: int) -> None:
    specs = {
        f"{name} {is_shared}": SPEC
        | fields
        | {"model": {"torch": summed}, "model_args": {"is_shared": is_shared}}
        for name, fields in CASES.items()
        for is_shared in (True, False)
    }
    results = trained_in_turn(specs, backend, replicas)
    for name in CASES:
        shared, apart = (results[f"{name} {each}"] for each in (True, False))
        np.testing.assert_allclose(shared["loss"], apart["loss"], rtol=1e-12)
        for weight, value in apart["weights"].items():
            np.testing.assert_allclose(shared["weights"][weight], value, rtol=1e-11, atol=1e-13)
