"""A loss that does not count all targets alike is the mean of the whole global batch, however it is split."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import isotrain

pytestmark = pytest.mark.slow

WEIGHTS = [0.25, 2.0, 1.0, 0.5]
SPLITS = [(1, 2), (2, 1), (2, 2), (3, 1)]
"""Numbers of replicas, and of slices of each."""


def network() -> Any:
    import torch

    return torch.nn.Linear(6, 4)


def samples() -> isotrain.DataSet:
    """Classes of which many are 1: all of some slices."""
    draw = np.random.default_rng(0)
    classes = np.where(draw.random(26) < 0.6, 1, draw.integers(4, size=26))
    pair = draw.standard_normal((26, 6)), classes
    return isotrain.DataSet(train=pair, validation=pair)


def ignoring() -> Any:
    import torch

    return torch.nn.CrossEntropyLoss(ignore_index=1)


def both() -> Any:
    import torch

    weight = torch.tensor(WEIGHTS, dtype=torch.float64)
    return torch.nn.CrossEntropyLoss(weight=weight, ignore_index=1)


def weighing() -> Any:
    import torch

    return torch.nn.CrossEntropyLoss(weight=torch.tensor(WEIGHTS, dtype=torch.float64))


LOSSES = {"ignoring": ignoring, "weighing": weighing, "both": both}
NAMED = {"name": "sparse_categorical_crossentropy", "from_logits": True, "ignore_class": 1}


def trained(session: isotrain.Session) -> list[float]:
    losses = [float(session.step(batch)) for batch in session.batches()]
    weights = session.read_state(("trainable",)).values()
    return [*losses, session.evaluate()["loss"], *(float(w.sum()) for w in weights)]


def losses_of(folder: Path, backend: str, loss: Any, replicas: int, accumulate: int) -> list[float]:
    spec = {
        "model": {"torch": network},
        "data": samples,
        "loss": loss,
        "optimizer": {"name": "sgd", "lr": 0.125, "momentum": 0.5},
        "global_batch": 8,
        "epochs": 2,
        "accumulate": accumulate,
        "precision": "float64",
        "threads": 1,
    }
    found: list[list[float]] = isotrain.launch(
        trained,
        spec,
        backend=backend,
        replicas=replicas,
        run_directory=folder,
        on_event=lambda event: None,
    )
    assert all(each == found[0] for each in found)
    return found[0]


@pytest.mark.parametrize("loss", [*LOSSES, "named"])
def test_any_split_gives_the_same(tmp_path: Path, loss: str) -> None:
    given = {"torch": LOSSES[loss]()} if loss in LOSSES else NAMED
    whole = losses_of(tmp_path / "whole", "torch-ddp", given, 1, 1)
    assert np.isfinite(whole).all()
    for replicas, accumulate in SPLITS:
        folder = tmp_path / f"{replicas}-{accumulate}"
        split = losses_of(folder, "torch-ddp", given, replicas, accumulate)
        np.testing.assert_allclose(split, whole, rtol=1e-12, err_msg=f"{replicas} {accumulate}")


def test_horovod(tmp_path: Path) -> None:
    given = {"torch": both()}
    whole = losses_of(tmp_path / "whole", "torch-ddp", given, 1, 1)
    split = losses_of(tmp_path / "split", "horovod-torch", given, 2, 2)
    np.testing.assert_allclose(split, whole, rtol=1e-12)
