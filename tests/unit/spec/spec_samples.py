"""Specs as mappings and as texts, and how the tests write and load them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from isotrain.core.errors import SpecError
from isotrain.core.spec.loading import load_spec

FIELDS: dict[str, Any] = {
    "model": {"torch": "math:hypot", "tensorflow": "json:loads"},
    "data": "json:load",
    "data_args": {"path": "digits", "shape": [8, 8]},
    "loss": {"name": "huber", "delta": 2.0},
    "metrics": ["accuracy", {"name": "math:hypot", "k": 3}],
    "optimizer": {"name": "sgd", "lr": 0.001, "momentum": 0.9},
    "schedule": "cosine",
    "clip": {"global_norm": 1.0},
    "global_batch_size": 32,
    "epochs": 2,
}
YAML = """
model: {torch: "math:hypot", tensorflow: json:loads}
data: json:load
data_args: {path: digits, shape: [8, 8]}
loss: {name: huber, delta: 2.0}
metrics:
  - accuracy
  - {name: math:hypot, k: 3}
optimizer: {name: sgd, lr: 1e-3, momentum: 0.9}
schedule: cosine
clip: {global_norm: 1}
global_batch_size: 32
epochs: 2
"""
TOML = """
data = "json:load"
metrics = ["accuracy", {name = "math:hypot", k = 3}]
schedule = "cosine"
global_batch_size = 32
epochs = 2
[model]
torch = "math:hypot"
tensorflow = "json:loads"
[data_args]
path = "digits"
shape = [8, 8]
[loss]
name = "huber"
delta = 2.0
[optimizer]
name = "sgd"
lr = 1e-3
momentum = 0.9
[clip]
global_norm = 1
"""
SMALL: dict[str, Any] = {
    "model": "math:hypot",
    "data": "json:load",
    "loss": "mse",
    "optimizer": "adam",
    "global_batch_size": 4,
    "steps": 3,
}


def write(folder: Path, name: str, text: str) -> Path:
    """A file in `folder`."""
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path


def refused(source: Any, *overrides: str) -> str:
    """The text of the error that reading `source` gives."""
    with pytest.raises(SpecError) as caught:
        load_spec(source, overrides)
    return str(caught.value)
