"""A native torch run imports no Keras, neither in the fork server nor in a rank."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import isotrain
from isotrain.testing.consecutive_sessions import launched_in_turn

pytestmark = pytest.mark.slow

SPEC = {
    "loss": {"name": "sparse_categorical_crossentropy", "from_logits": True},
    "metrics": ["accuracy", "precision_at_recall"],
    "optimizer": {"name": "adam", "lr": 0.125},
    "global_batch_size": 8,
    "epochs": 1,
    "threads": 1,
}
METRICS = [
    "accuracy",
    {"name": "sparse_top_k_categorical_accuracy", "k": 2},
    {"name": "mean_io_u", "num_classes": 3, "sparse_y_pred": False},
]


def network() -> Any:
    import torch

    return torch.nn.Linear(4, 3)


def samples() -> isotrain.DataSet:
    draw = np.random.default_rng(0)
    pair = draw.random((24, 4)).astype("f4"), draw.integers(3, size=24)
    return isotrain.DataSet(train=pair, validation=pair)


NATIVE = {**SPEC, "model": {"torch": network}, "data": samples, "metrics": METRICS}


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


def launched(
    folder: Path, backend: str, model: Any, replicas: int = 2, **changes: Any
) -> list[dict[str, Any]]:
    spec = {**SPEC, "model": model, "data": samples, "metrics": METRICS, **changes}
    found: list[dict[str, Any]] = isotrain.launch(
        trained,
        spec,
        backend=backend,
        replicas=replicas,
        output=folder,
        on_event=lambda event: None,
    )
    return found


STRATEGIES: dict[str, dict[str, Any]] = {
    "by default": {"name": "data-parallel"},
    "local-sgd": {"name": "local-sgd"},
    "gossip": {"name": "gossip"},
    "hierarchical": {"name": "hierarchical"},
    "elastic-averaging": {"name": "elastic-averaging"},
    "sharded": {"name": "sharded", "options": {"stage": 2}},
    **{
        f"compressed by {method}": {
            "name": "compressed",
            "options": {"method": method, "native": False},
        }
        for method in ("topk", "powersgd", "bf16")
    },
}


def told(session: isotrain.Session, name: str) -> dict[str, Any]:
    """What a session of a run in turns has trained and imported."""
    return trained(session)


def require_no_keras(found: dict[str, Any]) -> None:
    assert found["keras"] == []
    assert len(found["losses"]) in (3, 4)
    named = [name for name in found["metrics"] if "/" not in name]
    assert named == ["accuracy", "sparse_top_k_categorical_accuracy", "mean_io_u", "loss"]


def test_strategies_load_no_keras() -> None:
    specs = {
        name: {**NATIVE, "global_batch_size": 7, "strategy": strategy}
        for name, strategy in STRATEGIES.items()
    }
    for by_name in launched_in_turn(specs, told, "torch-ddp", 2):
        for name in specs:
            require_no_keras(by_name[name])


@pytest.mark.parametrize(
    ("backend", "replicas", "start", "strategy"),
    [
        ("torch-ddp", 1, "fresh", "data-parallel"),
        ("torch-ddp", 2, "forked", "parameter-server"),
        ("horovod-torch", 2, "forked", "data-parallel"),
    ],
)
def test_native_runs_load_no_keras(
    tmp_path: Path,
    backend: str,
    replicas: int,
    start: str,
    strategy: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It holds in a fresh process, in a parameter-server run and with Horovod."""
    monkeypatch.setenv("ISOTRAIN_START", start)
    asked = {"name": strategy}
    for found in launched(tmp_path, backend, {"torch": network}, replicas, strategy=asked):
        require_no_keras(found)


WITHOUT = """
from importlib.machinery import PathFinder

found = PathFinder.find_spec
PathFinder.find_spec = lambda name, *given: None if name == "keras" else found(name, *given)

import isotrain
from integration import test_without_keras as given

here = {"backend": "torch-ddp", "replicas": 1}
with isotrain.open_session(given.NATIVE, **here) as session:
    print(len(given.trained(session)["losses"]))
try:
    isotrain.open_session({**given.NATIVE, "model": given.late_keras}, **here).__enter__()
except isotrain.SpecError as error:
    print(error)
"""


def test_torch_trains_where_no_keras_is_installed() -> None:
    """A portable model is refused there, with the remedy."""
    run = subprocess.run(
        [sys.executable, "-c", WITHOUT],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        timeout=120,
    )
    assert run.returncode == 0, run.stderr
    steps, *refusal = run.stdout.splitlines()
    assert steps == "3"
    assert "the function imports Keras, which is not installed" in refusal[-1]


def test_a_function_that_imports_keras_late_runs(tmp_path: Path) -> None:
    seldom = launched(tmp_path / "a", "torch-ddp", {"torch": late_keras}, 1)
    always = launched(tmp_path / "b", "torch-ddp", late_keras, 1)
    assert seldom[0]["keras"]
    assert seldom[0]["start"] == always[0]["start"]
    assert seldom[0]["losses"] == always[0]["losses"]
