"""One cycle of rate and momentum on native torch models, against torch's own scheduler."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import isotrain

LR, STEPS, BATCH = 0.125, 12, 8
OPTIMIZERS = {
    "sgd": {"name": "sgd", "lr": LR, "momentum": 0.9},
    "adamw": {"name": "adamw", "lr": LR, "weight_decay": 0.01, "epsilon": 1e-8},
}


def model() -> Any:
    import torch

    return torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Tanh(), torch.nn.Linear(3, 1))


def data() -> Any:
    features = np.random.default_rng(0).normal(size=(BATCH * STEPS, 4))
    return isotrain.DataSet(train=(features, features.sum(axis=1, keepdims=True)))


def both(session: isotrain.Session) -> list[dict[str, np.ndarray]]:
    """Weights after the session's steps, and after those of a plain loop from the same start."""
    import torch

    plain = model().double()
    plain.load_state_dict(session.model.state_dict())
    kind = {"sgd": torch.optim.SGD, "adamw": torch.optim.AdamW}[session.spec.optimizer.name]
    options = {"momentum": 0.9} if kind is torch.optim.SGD else {"weight_decay": 0.01}
    optimizer = kind(plain.parameters(), lr=LR, **options)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=LR, total_steps=STEPS)
    for batch in session.batches():
        (part,) = batch.slices[0]
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(plain(part.inputs), part.targets).backward()
        optimizer.step()
        if batch.step + 1 < STEPS:
            scheduler.step()
        session.step(batch)
    return [
        {name: value.detach().numpy() for name, value in each.state_dict().items()}
        for each in (session.model, plain)
    ]


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_weights_are_those_of_torch(name: str, tmp_path: Path) -> None:
    spec = {
        "model": {"torch": model},
        "data": data,
        "loss": "mse",
        "optimizer": OPTIMIZERS[name],
        "schedule": {"name": "one-cycle", "momentum_range": [0.85, 0.95]},
        "precision": "float64",
        "global_batch_size": BATCH,
        "steps": STEPS,
    }
    ours, theirs = isotrain.launch(
        both, spec, backend="torch-ddp", output=tmp_path / "run", on_event=lambda event: None
    )[0]
    for weight, value in theirs.items():
        np.testing.assert_allclose(ours[weight], value, rtol=0, atol=1e-12, err_msg=weight)
