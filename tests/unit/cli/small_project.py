"""A small spec with the module that it names, and `isotrain` run on it in a process of its own."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

MODULE = """
import numpy as np
import isotrain
from isotrain.testing.reference.layers import Dense
from isotrain.testing.reference.network import Network

def model():
    return Network([Dense(3, 1)])

def broken_model():
    raise ValueError("no such layer")

def data():
    print("making the data")
    inputs = np.arange(30, dtype="float32").reshape(10, 3) / 30
    return isotrain.DataSet((inputs, inputs.sum(axis=1, keepdims=True)))
"""
SPEC: dict[str, Any] = {
    "name": "small",
    "model": "small.py:model",
    "data": "small.py:data",
    "loss": "mean_squared_error",
    "optimizer": {"name": "sgd", "lr": 0.1},
    "global_batch_size": 4,
    "epochs": 2,
    "plugins": "isotrain.testing.reference",
}


def started(arguments: Sequence[str], folder: Path, **options: Any) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "isotrain", *arguments]
    return subprocess.Popen(
        command,
        cwd=folder,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        **options,
    )


def isotrain(*arguments: str, folder: Path, **options: Any) -> subprocess.CompletedProcess[str]:
    process = started(arguments, folder, **options)
    output, errors = process.communicate(timeout=120)
    return subprocess.CompletedProcess(arguments, process.returncode, output, errors)


def redirected(command: str, folder: Path, before: str = "") -> subprocess.CompletedProcess[str]:
    """Runs `isotrain` by a shell, which opens and closes its streams, and does something before."""
    line = f"{before} exec {sys.executable} -m isotrain {command}"
    shell = ["sh", "-c", line]
    return subprocess.run(shell, cwd=folder, text=True, capture_output=True, check=False)
