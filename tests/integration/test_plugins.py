"""A third party's strategy and event hooks in real runs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

PLUGINS = Path(__file__).parents[1] / "plugins"
SCRIPT = """
import sys
import numpy as np
import isotrain

def model():
    import keras
    return keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])

def data():
    inputs = np.arange(36.0).reshape(12, 3) / 36
    if BREAKS:
        raise ValueError("no data today")
    return isotrain.DataSet((inputs, inputs[:, :1]), (inputs, inputs[:, :1]))

BREAKS = sys.argv[2] == "breaks"
spec = {
    "model": model, "data": data, "loss": "mean_squared_error", "precision": "float64",
    "optimizer": {"name": "sgd", "lr": 0.125}, "global_batch": 4, "epochs": 2,
    "strategy": {"name": "periodic-averaging", "options": {"every": 4}},
}
result = isotrain.run(spec, backend=sys.argv[1], replicas=2)
np.savez("weights.npz", **result.weights)
"""


def run(folder: Path, backend: str, how: str) -> tuple[subprocess.CompletedProcess[str], list[Any]]:
    (folder / "script.py").write_text(SCRIPT)
    variables = {
        "ISOTRAIN_PLUGINS": "recorder",
        "PYTHONPATH": str(PLUGINS),
        "RECORDER_FILE": str(folder / "told"),
    }
    finished = subprocess.run(
        [sys.executable, "script.py", backend, how],
        cwd=folder,
        env=os.environ | variables,
        capture_output=True,
        text=True,
    )
    return finished, [json.loads(line) for line in (folder / "told").read_text().splitlines()]


@pytest.mark.parametrize(
    "backend", ["torch-ddp", pytest.param("tf-multiworker", marks=pytest.mark.slow)]
)
def test_a_strategy_and_every_event_hook(tmp_path: Path, backend: str) -> None:
    finished, told = run(tmp_path, backend, "works")
    assert finished.returncode == 0, finished.stderr
    assert [event["event"] for event in told] == ["started", "epoch", "epoch", "finished"]
    assert told[0]["strategy"] == "periodic-averaging"
    assert told[1]["metrics"] == ["validation_loss"]
    assert "a logger that breaks" in finished.stderr
    with np.load(tmp_path / "weights.npz") as weights:
        assert len(weights.files) == 2


def test_a_failure_is_told(tmp_path: Path) -> None:
    finished, told = run(tmp_path, "torch-ddp", "breaks")
    assert finished.returncode != 0
    assert [event["event"] for event in told] == ["started", "failed"]
    assert "no data today" in told[1]["message"]
