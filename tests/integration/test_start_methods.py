"""What a process of a run finds when it starts."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

MODULE = """
import sys

WIDTH = int(sys.argv[2])

def model():
    import keras
    return keras.Sequential([keras.Input((4,)), keras.layers.Dense(WIDTH)])

def data():
    import numpy as np
    inputs = np.linspace(-1, 1, 64, dtype="float32").reshape(16, 4)
    return inputs, np.repeat(inputs[:, :1], WIDTH, axis=1)
"""
PROGRAM = """
import sys
import isotrain
spec = {"name": "arguments", "model": "mine:model", "data": "mine:data", "steps": 2, "global_batch": 8}
spec |= {"loss": "mean_squared_error", "optimizer": {"name": "sgd", "lr": 0.125}}
result = isotrain.run(spec, backend="torch-ddp", replicas=2)
print("parameters", result.plan["parameters"])
def work(session):
    return sys.argv
for argv in isotrain.launch(work, spec, backend="torch-ddp", replicas=2):
    print(argv == sys.argv)
"""


def test_modules_that_read_the_command_line_when_imported_find_it(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(MODULE)
    (tmp_path / "train.py").write_text(PROGRAM)
    many = [f"--odd=\udcff{number}" for number in range(20_000)]  # more than one argument may hold
    done = subprocess.run(
        [sys.executable, "train.py", "--width", "3", *many],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["parameters", "15", "True", "True"]
