"""A native torch run imports no Keras, neither in the template nor in a rank."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import isotrain

pytestmark = pytest.mark.slow

SPEC = {
    "loss": {"name": "sparse_categorical_crossentropy", "from_logits": True},
    "metrics": ["accuracy", "precision_at_recall"],
    "optimizer": {"name": "adam", "lr": 0.125},
    "global_batch": 8,
    "epochs": 1,
    "threads": 1,
}
METRICS = ["accuracy", {"name": "sparse_top_k_categorical_accuracy", "k": 2}]


def network() -> Any:
    import torch

    return torch.nn.Linear(4, 3)


def samples() -> isotrain.DataSet:
    draw = np.random.default_rng(0)
    pair = draw.random((24, 4)).astype("f4"), draw.integers(3, size=24)
    return isotrain.DataSet(train=pair, validation=pair)


def late_keras() -> Any:
    """A model function that imports Keras only when it is called."""
    import keras

    return keras.Sequential([keras.Input((4,)), keras.layers.Dense(3)])


def trained(session: isotrain.Session) -> dict[str, Any]:
    before = session.read_state()
    losses = [float(session.step(batch)) for batch in session.batches()]
    found = {**session.metrics(), **session.evaluate()}
    return {
        "losses": losses,
        "keras": sorted(name for name in sys.modules if name.partition(".")[0] == "keras"),
        "start": float(sum(value.sum() for value in before.values())),
        "metrics": found,
    }


def launched(folder: Path, backend: str, model: Any, **changes: Any) -> list[dict[str, Any]]:
    spec = {**SPEC, "model": model, "data": samples, "metrics": METRICS, **changes}
    found: list[dict[str, Any]] = isotrain.launch(
        trained,
        spec,
        backend=backend,
        replicas=2,
        run_directory=folder,
        on_event=lambda event: None,
    )
    return found


@pytest.mark.parametrize(
    ("backend", "start"),
    [("torch-ddp", "forked"), ("torch-ddp", "fresh"), ("horovod-torch", "forked")],
)
def test_no_keras(
    tmp_path: Path, backend: str, start: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ISOTRAIN_START", start)
    for found in launched(tmp_path, backend, {"torch": network}):
        assert found["keras"] == []
        assert len(found["losses"]) == 3
        assert set(found["metrics"]) == {"loss", "accuracy", "sparse_top_k_categorical_accuracy"}


def test_a_function_that_imports_keras_late_starts_as_ever(tmp_path: Path) -> None:
    seldom = launched(tmp_path / "a", "torch-ddp", {"torch": late_keras})
    always = launched(tmp_path / "b", "torch-ddp", late_keras)
    assert seldom[0]["keras"]
    assert seldom[0]["start"] == always[0]["start"]
    assert seldom[0]["losses"] == always[0]["losses"]
