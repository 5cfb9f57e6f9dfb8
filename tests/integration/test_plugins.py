"""A third party's strategy and event hooks in real runs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np

PLUGINS = Path(__file__).parents[1] / "plugins"
SCRIPT = """
import sys
import numpy as np
import isotrain
from isotrain.testing.reference.layers import Dense
from isotrain.testing.reference.network import Network

def model():
    return Network([Dense(3, 1)])

def data():
    inputs = np.arange(36.0).reshape(12, 3) / 36
    if BREAKS:
        raise ValueError("no data today")
    return isotrain.DataSet((inputs, inputs[:, :1]), (inputs, inputs[:, :1]))

BREAKS = sys.argv[1] == "breaks"
spec = {
    "model": model, "data": data, "loss": "mean_squared_error", "precision": "float64",
    "optimizer": {"name": "sgd", "lr": 0.125}, "global_batch_size": 4, "epochs": 2,
    "strategy": {"name": "periodic-averaging", "options": {"every": 4}},
}
result = isotrain.run(spec, backend="reference", replicas=2)
np.savez("weights.npz", **result.weights)
"""


def run(folder: Path, how: str) -> tuple[subprocess.CompletedProcess[str], list[Any]]:
    (folder / "script.py").write_text(SCRIPT)
    variables = {
        "ISOTRAIN_PLUGINS": "recorder,isotrain.testing.reference",
        "PYTHONPATH": os.pathsep.join([str(PLUGINS), os.environ["PYTHONPATH"]]),
        "RECORDER_FILE": str(folder / "told"),
    }
    finished = subprocess.run(
        [sys.executable, "script.py", how],
        cwd=folder,
        env=os.environ | variables,
        capture_output=True,
        text=True,
    )
    return finished, [json.loads(line) for line in (folder / "told").read_text().splitlines()]


def test_a_strategy_and_every_event_hook(tmp_path: Path) -> None:
    finished, told = run(tmp_path, "works")
    assert finished.returncode == 0, finished.stderr
    assert [event["event"] for event in told] == ["started", "epoch", "epoch", "finished"]
    assert told[0]["strategy"] == "periodic-averaging"
    assert told[1]["metrics"] == ["loss", "validation_loss"]
    assert "a logger that breaks" in finished.stderr
    with np.load(tmp_path / "weights.npz") as weights:
        assert len(weights.files) == 2


def test_a_failed_run_is_an_event(tmp_path: Path) -> None:
    finished, told = run(tmp_path, "breaks")
    assert finished.returncode != 0
    assert [event["event"] for event in told] == ["started", "failed"]
    assert "no data today" in told[1]["message"]
