"""Threads of a process: steps leave none behind."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import isotrain

EARLY, LATE = 10, 50
"""Steps after which threads are counted; those of thread pools have started by the first."""


def model() -> Any:
    import keras

    return keras.Sequential([keras.Input((4,)), *(keras.layers.Dense(4) for _ in range(4))])


def data() -> isotrain.DataSet:
    inputs = np.linspace(-1, 1, 4 * 4 * LATE).reshape(-1, 4).astype("float32")
    return isotrain.DataSet((inputs, inputs))


def threads(session: isotrain.Session) -> list[int]:
    """Numbers of threads of this process after two steps."""
    counts = []
    for batch in session.batches():
        session.step(batch)
        if batch.step + 1 in (EARLY, LATE):
            counts.append(len(list(Path("/proc/self/task").iterdir())))
    return counts


@pytest.mark.slow
@pytest.mark.features
@pytest.mark.parametrize(
    "strategy",
    [
        {"name": "sharded", "options": {"bucket_megabytes": 0.0001}},
        {"name": "sharded", "options": {"stage": 3, "bucket_megabytes": 0.0001}},
        {"name": "gossip"},
        {"name": "pipeline"},
    ],
    ids=["stage 1", "stage 3", "gossip", "pipeline"],
)
def test_collectives_of_tensorflow_leave_no_threads(
    tmp_path: Path, strategy: dict[str, Any]
) -> None:
    spec = {
        "model": model,
        "data": data,
        "loss": "mse",
        "optimizer": {"name": "sgd", "lr": 0.1},
        "global_batch_size": 4,
        "epochs": 1,
        "strategy": strategy,
    }
    replicas = 1 if strategy["name"] == "pipeline" else 2
    returned = isotrain.launch(
        threads,
        spec,
        backend="tf-multiworker",
        replicas=replicas,
        output=tmp_path / "run",
        on_event=lambda event: None,
    )
    for early, late in returned:
        assert late < early + (LATE - EARLY) / 4, "not one in each step"
