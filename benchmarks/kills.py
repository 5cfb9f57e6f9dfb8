"""Whether a run that is killed again and again loses more than it may, and ends as one that never was.

A random process of the run is killed with SIGKILL at a random moment, also while checkpoints are written and
while the run starts again. `reference` is the NumPy backend of the test kit. A kill may cost the steps since
the newest checkpoint that was complete: the interval, and what was trained while the next one was written;
none may cost a checkpoint of which the run had told that it is complete. Seconds of a restart are from the
kill, those of a start from the call, until every process is ready for its next step.
`python -m benchmarks.kills [--backend NAME] [--kills N] [--steps N] [--seed N]`: so many steps for each kill.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import signal
import statistics
import tempfile
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

import isotrain

_EVERY = 10
_REPLICAS = 2
_SECONDS = 0.4
"""From a start to the kill after it, on average, besides what a start takes."""
_STEP_SECONDS = 0.004
"""What a step takes at least, so that kills fall between checkpoints too."""


def network() -> Any:
    from isotrain.testing.reference.layers import Dense, Dropout
    from isotrain.testing.reference.network import Network

    return Network([Dense(4, 32, "tanh", name="hidden"), Dropout(0.25), Dense(32, 3, name="head")])


def portable() -> Any:
    import keras
    from keras import layers

    parts = [layers.Dense(32, activation="tanh"), layers.Dropout(0.25), layers.Dense(3)]
    return keras.Sequential([keras.Input((4,)), *parts])


def data() -> isotrain.DataSet:
    inputs = np.random.default_rng(2).standard_normal((93, 4))
    return isotrain.DataSet((inputs, np.arange(93) % 3))


def slowly(inputs: Any, targets: Any, draws: Any) -> tuple[Any, Any]:
    """Changes no sample, and takes a while."""
    time.sleep(_STEP_SECONDS)
    return inputs, targets


class Killer:
    """Kills a process of the run now and then, until it has done so often enough.

    Attributes:
        starts: The seconds from each kill until all processes were ready; of a run that nobody kills, from
            the call.
        forgotten: How often a restart went on before a checkpoint that had been called complete.
    """

    def __init__(self, kills: int, seed: int, processes: int) -> None:
        self.starts: list[float] = []
        self.forgotten = 0
        self._left = kills
        self._processes = processes
        self._draw = random.Random(seed)
        self._pids: list[int] = []
        self._timer: threading.Timer | None = None
        self._began = None if kills else time.time()
        self._ready = self._complete = 0

    def hear(self, event: Mapping[str, Any]) -> None:
        """Learns of processes and checkpoints."""
        match event["event"]:
            case "started":
                self._pids = [*self._pids, event["pid"]][-self._processes :]
                self._set_timer()
            case "ready":
                self._ready += 1
                if self._ready == self._processes and self._began is not None:
                    self.starts.append(event["time"] - self._began)
                    self._began = None
            case "checkpoint":
                self._complete = event["done"]
            case "restarted":
                self.forgotten += event["from_step"] < self._complete

    def _set_timer(self) -> None:
        """The kill is due some time after the processes have begun, ready or not."""
        if self._timer is not None:
            self._timer.cancel()
        if self._left:
            mean = _SECONDS + (statistics.median(self.starts) if self.starts else 0)
            self._timer = threading.Timer(self._draw.expovariate(1 / mean), self._kill)
            self._timer.start()

    def _kill(self) -> None:
        self._left -= 1
        self._began, self._ready = time.time(), 0
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._draw.choice(self._pids), signal.SIGKILL)


def main(backend: str, kills: int, steps: int, seed: int) -> None:
    """Runs once undisturbed and once with kills, and compares."""
    spec = {
        "model": {"reference": network, "torch": portable, "tensorflow": portable},
        "data": data,
        "transform": slowly,
        "loss": {"name": "sparse_categorical_crossentropy", "from_logits": True},
        "metrics": ["accuracy"],
        "optimizer": {"name": "adam", "lr": 0.001},
        "global_batch": 8,
        "steps": steps * kills,
        "checkpoint": {"every_steps": _EVERY},
        "plugins": ["isotrain.testing.reference"],
    }
    with tempfile.TemporaryDirectory() as folder:
        options: dict[str, Any] = {"backend": backend, "replicas": _REPLICAS}
        processes = len(isotrain.plan(spec, **options).processes)
        watcher, killer = Killer(0, seed, processes), Killer(kills, seed, processes)
        whole = isotrain.run(
            spec, run_directory=Path(folder, "whole"), on_event=watcher.hear, **options
        )
        found = isotrain.run(
            spec,
            run_directory=Path(folder, "killed"),
            on_event=killer.hear,
            max_restarts=2 * kills,
            **options,
        )
        same = all(np.array_equal(found.weights[n], w) for n, w in whole.weights.items())
        history = found.history == whole.history
    _print(backend, watcher.starts[0], killer, found)
    print(
        f"weights {'equal' if same else 'NOT EQUAL'}, history {'equal' if history else 'NOT EQUAL'}"
    )


def _print(backend: str, start: float, killer: Killer, found: isotrain.RunResult) -> None:
    lost = [each["after_step"] - each["from_step"] for each in found.restarts]
    print(
        f"{backend}: {len(lost)} restarts, a checkpoint every {_EVERY} steps; steps lost: median"
        f" {statistics.median(lost):g}, most {max(lost)}, more than {_EVERY} in"
        f" {sum(each > _EVERY for each in lost)}; complete checkpoints lost: {killer.forgotten}"
    )
    again = statistics.median(killer.starts)
    print(f"seconds to the next step: first start {start:.2f}, restart {again:.2f}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--backend", default="reference")
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=150)
    given = parser.parse_args()
    main(given.backend, given.kills, given.steps, given.seed)
