"""Trains the cases under isotrain once for all tests: those of a backend and number of replicas in turn."""

from __future__ import annotations

import functools
from typing import Any

from conformance import cases
from helpers.shared_results import once

from isotrain.testing import native_equality

SPECS: dict[str, dict[str, Any]] = {
    "adamw-float64": cases.spec("adamw", "float64", drop_remainder=True, **cases.CLIPPED),
    "adam-float32": cases.spec("adam", "float32", drop_remainder=True),
    "adam-small": cases.spec("adam", "float32", model=cases.small_model),
    **{f"{name}-keras": cases.spec(name, "float32", capture=False) for name in ("sgd", "adam")},
    **{f"{name}-torch": cases.native_torch_spec(name) for name in ("sgd", "adam")},
}
"""What can be trained, by name."""

FLOAT64, FLOAT32, SMALL = "adamw-float64", "adam-float32", "adam-small"
TRAINED: dict[tuple[str, int], tuple[str, ...]] = {
    ("torch-ddp", 2): (FLOAT64, FLOAT32, SMALL, "adam-keras", "adam-torch"),
    ("torch-ddp", 3): ("sgd-keras", "sgd-torch"),
    ("horovod-torch", 2): (FLOAT64, SMALL, "adam-torch"),
    ("tf-multiworker", 2): (FLOAT64, SMALL),
    ("tf-mirrored", 2): (FLOAT64, FLOAT32, SMALL),
    ("horovod-tf", 2): (FLOAT64, SMALL),
}
"""The cases that a run's processes train one after the other, by backend and replicas; others train alone."""


def trained(backend: str, replicas: int, case: str) -> dict[str, Any]:
    """What process 0 has after training: `start` and `weights` by name, `loss` of every step."""
    train = functools.partial(_in_turn, backend, replicas, case)
    found: dict[str, Any] = once(f"trained-{backend}-{replicas}", train)[case]
    return found


def _in_turn(backend: str, replicas: int, case: str) -> dict[str, dict[str, Any]]:
    names = TRAINED.get((backend, replicas), (case,))
    return native_equality.trained_in_turn({name: SPECS[name] for name in names}, backend, replicas)
