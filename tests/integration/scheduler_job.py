"""A small job that processes on other hosts can import."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np

import isotrain
from isotrain.core.planning.cluster_environment import cluster_info_of
from isotrain.core.plugins.manager import plugin_manager
from isotrain.testing.reference.layers import Dense
from isotrain.testing.reference.network import Network


def model() -> Network:
    return Network([Dense(4, 2, name="head")])


def data() -> tuple[np.ndarray, np.ndarray]:
    inputs = np.linspace(-1, 1, 64, dtype="float32").reshape(16, 4)
    return inputs, inputs[:, :2]


SPEC: dict[str, Any] = {
    "model": "integration.scheduler_job:model",
    "data": "integration.scheduler_job:data",
    "loss": "mean_squared_error",
    "optimizer": {"name": "sgd", "lr": 0.125},
    "global_batch_size": 4,
    "epochs": 1,
    "plugins": ["isotrain.testing.reference"],
}
"""Of one epoch of 4 steps."""
SLOW = SPEC | {
    "data": "integration.scheduler_job:Slow",
    "optimizer": {"name": "sgd", "lr": 0.125, "momentum": 0.5},
    "precision": "float64",
}
"""Of steps that take a while, and equal the local ones to rounding."""


class Slow:
    """Samples that take a while to come."""

    SECONDS = 0.25

    def __len__(self) -> int:
        return len(data()[0])

    def gather(self, indices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        time.sleep(self.SECONDS)
        inputs, targets = data()
        return inputs[indices], targets[indices]


class LosesRankOne:
    """Callback in which rank 1 is lost; few steps are taken then before another process has joined."""

    starts = 0

    def on_start(self, session: isotrain.Session) -> None:
        LosesRankOne.starts += 1

    def on_step(self, session: isotrain.Session, batch: Any, loss: Any) -> None:
        if batch.step == 1 and os.environ.get("RANK") == "1":
            os.kill(os.getpid(), signal.SIGKILL)
        if session.rank == 0 and LosesRankOne.starts == 2:
            events = session.run_directory / "events.jsonl"
            while '"waiting"' not in events.read_text():
                time.sleep(0.05)
            time.sleep(0.5)


class SlowAndLoud(Slow):
    """The same, and it is told."""

    def gather(self, indices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        print("samples are read", flush=True)
        return super().gather(indices)


class KilledOnce(Slow):
    """Samples at the sixth batch of which their process is killed once, when there is a checkpoint."""

    SECONDS = 0.0
    MARK = "ISOTRAIN_KILLED_ONCE"

    def __init__(self) -> None:
        self._batches = 0

    def gather(self, indices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        self._batches += 1
        mark = Path(os.environ[self.MARK])
        if self._batches == 6 and not mark.exists():
            while not [*mark.parent.glob("**/manifest.json")]:
                time.sleep(0.01)
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return super().gather(indices)


LIKE_EVENTS = ('{"event": "error", "error": "X", "message": "not of isotrain"}', '{"event": 5}')


def data_that_print() -> tuple[np.ndarray, np.ndarray]:
    for line in LIKE_EVENTS:
        print(line, flush=True)
    return data()


GATE = "ISOTRAIN_GATE"
"""Names the file that `data_behind_a_gate` waits for."""
_GATE_SECONDS = 100.0


def data_behind_a_gate() -> tuple[np.ndarray, np.ndarray]:
    print(f"rank {os.environ['RANK']} waits", flush=True)
    deadline = time.monotonic() + _GATE_SECONDS
    while not Path(os.environ[GATE]).exists():
        assert time.monotonic() < deadline, "nobody has seen it wait"
        time.sleep(0.01)
    return data()


def data_not_finite() -> tuple[np.ndarray, np.ndarray]:
    print("samples are made", flush=True)
    inputs, targets = data()
    return inputs * np.nan, targets


def data_of_a_killed_process() -> tuple[np.ndarray, np.ndarray]:
    os.kill(os.getpid(), signal.SIGKILL)
    return data()


def data_killed_on_rank_1() -> tuple[np.ndarray, np.ndarray]:
    place = cluster_info_of(os.environ, plugin_manager())
    assert place is not None
    return data_of_a_killed_process() if place.rank == 1 else data()
