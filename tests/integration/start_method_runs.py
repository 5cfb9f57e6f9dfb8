"""Small runs by which the tests see how processes are started."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cloudpickle
import numpy as np
import psutil
from helpers.leftover_processes import is_alive

import isotrain
from isotrain.testing.reference.layers import Dense
from isotrain.testing.reference.network import Network

cloudpickle.register_pickle_by_value(sys.modules[__name__])

LIMIT_SECONDS = 60.0
"""Time within which something happens that happens at once on an idle machine."""


def model() -> Network:
    return Network([Dense(4, 2)])


def portable() -> Any:
    import keras

    return keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)])


MODELS = {"numpy": model}


def spec(**changes: Any) -> dict[str, Any]:
    inputs = np.linspace(-1, 1, 64, dtype="float32").reshape(16, 4)
    fields = {"name": "starting", "model": MODELS, "data": (inputs, inputs[:, :2].copy())}
    fields |= {"loss": "mean_squared_error", "optimizer": {"name": "sgd", "lr": 0.125}}
    return fields | {"global_batch_size": 8, "epochs": 1} | changes


def launch(
    work: Any,
    folder: Path,
    hear: Callable[[Any], None] = id,
    backend: str = "reference",
    **changes: Any,
) -> list[Any]:
    return isotrain.launch(
        work,
        spec(**changes),
        backend=backend,
        replicas=2,
        output=folder,
        on_event=hear,
    )


def parameters(session: Any) -> int | None:
    return session.plan.parameters  # type: ignore[no-any-return]


def fork_server_pids() -> set[int]:
    """Process ids of the fork servers of this program."""
    return {
        child.pid
        for child in psutil.Process().children()
        if is_alive(child.pid) and "forkserver.server" in " ".join(child.cmdline())
    }
