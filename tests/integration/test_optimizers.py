"""What the spec says of its optimizers is what the real ones do."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest

pytestmark = pytest.mark.slow

OPTIMIZERS: list[dict[str, Any]] = [
    {"name": "sgd"},
    {"name": "sgd", "momentum": 0.5},
    {"name": "sgd", "momentum": 0.5, "nesterov": True},
    {"name": "adam"},
    {"name": "adam", "amsgrad": True},
    {"name": "adamw"},
    {"name": "rmsprop"},
    {"name": "rmsprop", "momentum": 0.5},
    {"name": "rmsprop", "centered": True},
    {"name": "rmsprop", "momentum": 0.5, "centered": True},
    {"name": "adagrad"},
    {"name": "lamb"},
]
PROGRAM = """
import json, sys
import keras, torch
from isotrain.adapters import portable
from isotrain.adapters.torch import native_program
from isotrain.core.spec.files import load_spec

def described(fields):
    given = {"model": dict, "data": dict, "loss": "mse", "global_batch": 1, "steps": 1}
    spec = load_spec({**given, "optimizer": fields})
    weight = keras.Variable([1.0, 2.0], name="w")
    optimizer, _ = portable.build_optimizer(spec, "torch")
    optimizer.build([weight])
    named = [v.path.rpartition("/w_")[2] for v in optimizer.variables if "/w_" in v.path]
    own = torch.nn.Parameter(torch.ones(2))
    native = native_program.build_optimizer(spec, [own])
    own.grad = torch.ones(2)
    native.step()
    kept = [slot for slot in native.state[own].values() if torch.is_tensor(slot) and slot.dim()]
    return [list(spec.optimizer.slots), named, len(kept)]

print(json.dumps([described(fields) for fields in json.loads(sys.argv[1])]))
"""


@pytest.fixture(scope="module")
def described() -> list[Any]:
    fields = [{"lr": 0.1, **optimizer} for optimizer in OPTIMIZERS]
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, json.dumps(fields)],
        env={**os.environ, "KERAS_BACKEND": "torch"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return list(json.loads(done.stdout))


@pytest.mark.parametrize("index", range(len(OPTIMIZERS)), ids=lambda i: str(OPTIMIZERS[i]))
def test_slots_are_those_of_keras_and_as_many_as_of_torch(described: list[Any], index: int) -> None:
    said, named, count = described[index]
    assert sorted(said) == sorted(named)
    assert len(said) == count
