"""Whether memory grows with the steps: a run of very many steps, of which each costs next to nothing.

Everything of a run is as ever (data, session, events, run directory) but the training itself, on the
reference backend: no framework's memory hides what grows.
`python -m benchmarks.long_run [STEPS]`
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import psutil

import isotrain
from isotrain.testing.reference.layers import Dense
from isotrain.testing.reference.network import Network

_SAMPLES, _BATCH = 64, 8


class Idle(isotrain.Strategy):
    """Trains nothing: gives the same loss for every step."""

    name = "idle"
    summary = "trains nothing"
    requires = frozenset()

    def started(self, group: isotrain.ReplicaGroup) -> None:
        self._loss = group.tensor(np.array(0.5, np.float32))

    def step(self, group: isotrain.ReplicaGroup, batch: Any, learning_rate: float) -> Any:
        return self._loss


def data() -> isotrain.DataSet:
    return isotrain.DataSet(
        (np.zeros((_SAMPLES, 1), np.float32), np.zeros((_SAMPLES, 1), np.float32))
    )


def model() -> Network:
    return Network([Dense(1, 1)])


def main(steps: int) -> None:
    """Prints the memory of rank 0 and of the process that launched it as the run goes on."""
    isotrain.register(Idle)
    spec = {
        "model": {"numpy": model},
        "data": data,
        "loss": "mean_squared_error",
        "optimizer": {"name": "sgd", "lr": 0.1},
        "global_batch_size": _BATCH,
        "steps": steps,
        "strategy": "idle",
        "metrics": [],
        "plugins": ["isotrain.testing.reference"],
    }
    seen = _Seen(steps)
    with tempfile.TemporaryDirectory() as folder:
        directory = Path(folder) / "run"
        result = isotrain.run(spec, backend="reference", output=directory, on_event=seen.on_event)
        on_disk = (directory / "steps.jsonl").stat().st_size
        assert len(result.history.loss) == steps
    print(f"steps.jsonl: {on_disk / steps:.0f} bytes a step; {steps / seen.seconds():,.0f} steps/s")


class _Seen:
    """Notes memory ten times in a run; the first figures are of the first tenth's end."""

    def __init__(self, steps: int) -> None:
        self._every = steps // 10
        self._next = self._every
        self._worker: psutil.Process | None = None
        self._began = 0.0

    def on_event(self, event: Any) -> None:
        if event["event"] == "started":
            self._worker = psutil.Process(event["pid"])
            self._began = time.monotonic()
        if event["event"] == "progress" and event["done"] >= self._next:
            self._next += self._every
            assert self._worker is not None
            own, other = (p.memory_info().rss / 1e6 for p in (psutil.Process(), self._worker))
            print(
                f"step {event['done']:>10,}: rank 0 {other:7.1f} MB, launcher {own:7.1f} MB",
                flush=True,
            )

    def seconds(self) -> float:
        return time.monotonic() - self._began


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("steps", nargs="?", type=int, default=2_000_000, metavar="STEPS")
    main(parser.parse_args().steps)
