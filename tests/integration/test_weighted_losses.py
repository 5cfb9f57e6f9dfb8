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
    return [*losses, session.evaluate()["loss"], *(float(np.abs(w).sum()) for w in weights)]


def losses_of(
    folder: Path, backend: str, replicas: int, accumulate: int, **changes: Any
) -> list[float]:
    spec = {
        "model": {"torch": network},
        "data": samples,
        "optimizer": {"name": "sgd", "lr": 0.125, "momentum": 0.5},
        "global_batch": 8,
        "epochs": 2,
        "accumulate": accumulate,
        "precision": "float64",
        "threads": 1,
        **changes,
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
    whole = losses_of(tmp_path / "whole", "torch-ddp", 1, 1, loss=given)
    assert np.isfinite(whole).all()
    for replicas, accumulate in SPLITS:
        folder = tmp_path / f"{replicas}-{accumulate}"
        split = losses_of(folder, "torch-ddp", replicas, accumulate, loss=given)
        np.testing.assert_allclose(split, whole, rtol=1e-12, err_msg=f"{replicas} {accumulate}")


def test_horovod(tmp_path: Path) -> None:
    given = {"torch": both()}
    whole = losses_of(tmp_path / "whole", "torch-ddp", 1, 1, loss=given)
    split = losses_of(tmp_path / "split", "horovod-torch", 2, 2, loss=given)
    np.testing.assert_allclose(split, whole, rtol=1e-12)


def masked() -> Any:
    """What is masked counts neither in the loss nor in how much there is; what is added counts by samples."""
    import keras

    inputs = keras.Input((5,))
    embedded = keras.layers.Embedding(9, 6, mask_zero=True)(inputs)
    added = keras.regularizers.L2(0.125)
    hidden = keras.layers.LSTM(4, return_sequences=True, activity_regularizer=added)(embedded)
    return keras.Model(inputs, keras.layers.Dense(4)(hidden))


def plain() -> Any:
    import keras

    return keras.Sequential([keras.Input((6,)), keras.layers.Dense(4)])


def sentences() -> isotrain.DataSet:
    """Of lengths from 0 to 5, the rest of them 0."""
    draw = np.random.default_rng(1)
    words = draw.integers(1, 9, size=(26, 5))
    words[np.arange(5) >= draw.integers(6, size=26)[:, None]] = 0
    words[8:11] = 0
    pair = words, draw.integers(4, size=(26, 5))
    return isotrain.DataSet(train=pair, validation=pair)


CROSS_ENTROPY = {"name": "sparse_categorical_crossentropy", "from_logits": True}
PORTABLE = {
    "masked": {"model": masked, "data": sentences, "loss": CROSS_ENTROPY},
    "both": {"model": masked, "data": sentences, "loss": NAMED},
    "ignoring": {"model": plain, "loss": NAMED},
}
FEW = [("torch-ddp", 3, 2), ("tf-mirrored", 2, 2)]
ALL = [
    *FEW,
    ("torch-ddp", 2, 1),
    ("horovod-torch", 2, 1),
    ("tf-mirrored", 1, 2),
    ("tf-mirrored", 3, 1),
]
ALL += [("tf-multiworker", 2, 2), ("horovod-tf", 3, 1)]


@pytest.mark.parametrize("which", PORTABLE)
def test_portable_models(tmp_path: Path, which: str) -> None:
    changes = PORTABLE[which]
    whole = losses_of(tmp_path / "whole", "torch-ddp", 1, 1, **changes)
    assert np.isfinite(whole).all()
    for backend, replicas, accumulate in ALL if which == "both" else FEW:
        folder = tmp_path / f"{backend}-{replicas}"
        split = losses_of(folder, backend, replicas, accumulate, **changes)
        np.testing.assert_allclose(split, whole, rtol=1e-12, err_msg=f"{backend} {replicas}")


@pytest.mark.parametrize("backend", ["torch-ddp", "tf-mirrored"])
def test_the_plan_says_what_local_steps_do_not_honour(backend: str) -> None:
    spec = {
        "model": masked,
        "data": sentences,
        "loss": CROSS_ENTROPY,
        "optimizer": {"name": "sgd", "lr": 0.125},
        "global_batch": 8,
        "epochs": 1,
        "strategy": "local-sgd",
    }
    remarks = isotrain.measured_plan(spec, backend=backend, replicas=2).remarks
    assert any("In local steps" in remark for remark in remarks)
