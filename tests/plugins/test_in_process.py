"""Plugins that no package installs: registered in a script, named in a spec or on the command line."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.in_process import command

SCRIPT = """\
import sys
import threading
import numpy as np
import isotrain
import isotrain.testing.reference
from isotrain import Capability
from isotrain.testing.reference.layers import Dense
from isotrain.testing.reference.network import Network

def model():
    return Network([Dense(2, 1)])

def data():
    inputs = np.arange(24.0).reshape(12, 2) / 24
    return (inputs, inputs[:, :1])

@isotrain.register
class Mine(isotrain.Strategy):
    name = "mine"
    summary = "an older version of the cell"
    requires = frozenset()

    def step(self, group, batch, learning_rate):
        raise AssertionError("the older version")

@isotrain.register
class Mine(isotrain.Strategy):
    name = "mine"
    summary = "the backend's own step"
    requires = frozenset({Capability.SYNCHRONOUS_STEP})
    stuck = threading.Lock() if "stuck" in sys.argv else None

    def step(self, group, batch, learning_rate):
        if batch.step == 0:
            print("mine on rank", flush=True)
        return group.synchronous_step(batch, learning_rate)

class Watching:
    '''Only hears events, and could not travel.'''

    def __init__(self):
        self.lock = threading.Lock()

    @isotrain.hookimpl
    def isotrain_epoch_ended(self, epoch, metrics):
        with self.lock:
            print(f"heard of epoch {epoch}\\n", end="", flush=True)

isotrain.register(isotrain.testing.reference)
isotrain.register(Watching())
spec = {
    "model": model, "data": data, "loss": "mean_squared_error", "strategy": "mine",
    "optimizer": {"name": "sgd", "lr": 0.125}, "global_batch_size": 4, "epochs": 1,
}
isotrain.run(spec, backend="reference", replicas=2, output="out")
"""
SPEC = """\
model: from-a-file
data: parts/net.py:data
loss: mean_squared_error
optimizer: {name: sgd, lr: 0.125}
global_batch_size: 4
epochs: 1
plugins: [parts/mine.py, isotrain.testing.reference]
"""
PLUGIN = """\
import isotrain

@isotrain.hookimpl
def isotrain_register_models(register):
    register.add("parts.net:model", name="from-a-file")
"""


def python(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments], cwd=folder, env=os.environ, capture_output=True, text=True
    )


@pytest.mark.slow
def test_a_strategy_of_a_script_reaches_the_ranks_and_a_listener_does_not(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    finished = python(tmp_path, "script.py")
    assert finished.returncode == 0, finished.stderr
    assert "mine on rank" in finished.stdout
    assert "mine on rank" in (tmp_path / "out" / "rank-1.log").read_text()
    assert "heard of epoch 0" in finished.stdout


def test_an_unpicklable_strategy_is_refused(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    finished = python(tmp_path, "script.py", "stuck")
    assert finished.returncode == 1
    assert "plugins.registered" in finished.stderr
    assert "cannot be sent to the processes of the run" in finished.stderr


@pytest.mark.slow
def test_a_spec_may_name_a_plugin_file(tmp_path: Path) -> None:
    parts = tmp_path / "parts"
    parts.mkdir()
    (tmp_path / "spec.yaml").write_text(SPEC)
    (parts / "net.py").write_text(SCRIPT.split("@isotrain.register")[0])
    (parts / "mine.py").write_text(PLUGIN)
    listed = command("plugins", "spec.yaml", folder=tmp_path)
    assert "mine.py" in listed.stdout
    assert "from-a-file" in listed.stdout
    run = ("run", "spec.yaml", "--backend", "reference", "--quiet")
    finished = python(tmp_path, "-m", "isotrain", *run)
    assert finished.returncode == 0, finished.stderr
    assert "final loss" in finished.stdout
    broken = command(*run, "--plugin", "parts/nowhere.py", folder=tmp_path)
    assert broken.returncode == 2
    assert "plugin 'nowhere.py' (--plugin): there is no file" in broken.stderr
    misspelled = command(*run, "--set", "plugins.0=parts/mein.py", folder=tmp_path)
    assert "plugins.0" in misspelled.stderr
    assert "Did you mean 'mine.py'?" in misspelled.stderr
