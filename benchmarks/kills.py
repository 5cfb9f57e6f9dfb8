"""Whether a run that is killed again and again loses more than it may, and ends as one that never was.

A random process of the run is killed with SIGKILL at a random moment, also while checkpoints are written and
while the run starts again. `reference` is the NumPy backend of the test kit. A restart must go on from the
newest checkpoint of which the run had told that it is complete, or a newer one. What that may cost is

* with `--wait` (`checkpoint.background: false` in the spec: training waits for each checkpoint) the interval
  between checkpoints, and no step more;
* else the interval, and what was trained while the next checkpoint was written: an interval more at most, as
  no checkpoint is begun before the one before is complete.

Seconds are from the kill until a step is done. With `--record` portable models are replayed on torch.

`python -m benchmarks.kills [--backend NAME ...] [--strategy NAME[,OPTION=VALUE...] ...] [--wait] [--record]
[--kills N] [--steps N] [--seed N]`: so many steps for each kill; with few, a run ends before it was killed
so often. Many kills can be had in parts, each with a seed of its own. One line is printed for each strategy
on each backend; the exit code is 1 if any lost more than it may, ended as another run, or failed.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import os
import random
import signal
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

import isotrain
from isotrain.core.cli.argument_types import name_with_options
from isotrain.core.spec.sections import StrategyChoice

_EVERY = 10
REPLICAS = 2
_SECONDS = 0.4
"""Mean time from the end of a start to the kill after it."""
_STEP_SECONDS = 0.004
"""Minimum duration of a step, so that kills fall between checkpoints too."""


def network(dropout: float) -> Any:
    from isotrain.testing.reference.layers import Dense, Dropout
    from isotrain.testing.reference.network import Network

    hidden = Dense(4, 32, "tanh", name="hidden")
    return Network([hidden, Dropout(dropout), Dense(32, 3, name="head")])


def portable(dropout: float) -> Any:
    import keras
    from keras import layers

    parts = [layers.Dense(32, activation="tanh"), layers.Dropout(dropout), layers.Dense(3)]
    return keras.Sequential([keras.Input((4,)), *parts])


def native(dropout: float) -> Any:
    from torch import nn

    return nn.Sequential(nn.Linear(4, 32), nn.Tanh(), nn.Dropout(dropout), nn.Linear(32, 3))


def data() -> isotrain.DataSet:
    inputs = np.random.default_rng(2).standard_normal((93, 4))
    return isotrain.DataSet((inputs, np.arange(93) % 3))


def slowly(inputs: Any, targets: Any, draws: Any) -> tuple[Any, Any]:
    """Changes no sample, and takes a while."""
    time.sleep(_STEP_SECONDS)
    return inputs, targets


DATA_PARALLEL: dict[str, Any] = {"name": "data-parallel", "options": {}}
_MORE = {"pipeline": {"gradient_accumulation_steps": 2}}
"""Further fields of the specs of some strategies."""


def training(
    steps: int, strategy: Mapping[str, Any] = DATA_PARALLEL, record: bool = False
) -> dict[str, Any]:
    """The spec of a small run on any backend."""
    is_spread = strategy["options"].get("stage") == 3  # native models only
    on_torch = native if is_spread else portable
    return {
        "model": {"numpy": network, "torch": on_torch, "tensorflow": portable},
        "model_args": {"dropout": 0.25},
        "strategy": strategy,
        "data": data,
        "loss": {"name": "sparse_categorical_crossentropy", "from_logits": True},
        "metrics": ["accuracy"],
        "optimizer": {"name": "adam", "lr": 0.001},
        "global_batch_size": 8,
        "steps": steps,
        "threads": 1,
        "capture": record,
        "plugins": ["isotrain.testing.reference"],
        **_MORE.get(strategy["name"], {}),
    }


def disturbed(background: bool = True) -> dict[str, Any]:
    """Further fields of the specs of runs that are killed."""
    policy = {"every_steps": _EVERY, "background": background}
    return {"transform": slowly, "checkpoint": policy}


class Killer:
    """Kills a process of the run now and then, until it has done so often enough.

    Attributes:
        wanted: Number of processes to kill.
        made: Number of processes killed.
        first_start: The seconds from the call to the first step, until which nobody is killed.
        restarts: The seconds from each kill to the next step.
        forgotten: Number of restarts that went on before a checkpoint that had been called complete.
    """

    def __init__(self, kills: int, seed: int) -> None:
        self.wanted = kills
        self.made = 0
        self.first_start = 0.0
        self.restarts: list[float] = []
        self.forgotten = 0
        self._draw = random.Random(seed)
        self._pids: dict[int, int] = {}
        self._timer: threading.Timer | None = None
        self._began: float | None = time.time()
        self._is_starting = True
        self._complete = 0

    def on_event(self, event: Mapping[str, Any]) -> None:
        """Learns of processes, steps and checkpoints."""
        match event["event"]:
            case "started":
                self._pids[event["rank"]] = event["pid"]
                if self.first_start:
                    self._set_timer()
            case "worker lost":  # without which the run goes on
                self._pids.pop(event["lost_rank"], None)
                self._set_timer()
            case "steps":
                if self._is_starting and self._began is not None:
                    self._note_start(event["time"] - self._began)
            case "checkpoint":
                self._complete = event["done"]
            case "restarted":
                self._is_starting = True
                self.forgotten += event["from_step"] < self._complete

    def _note_start(self, seconds: float) -> None:
        self._began = None
        if self.first_start:
            self.restarts.append(seconds)
        else:
            self.first_start = seconds
            self._set_timer()

    def _set_timer(self) -> None:
        """The kill is due some time after the processes have begun, ready or not."""
        if self._timer is not None:
            self._timer.cancel()
        if self.made < self.wanted:
            usual = statistics.median(self.restarts or [self.first_start])
            self._timer = threading.Timer(
                self._draw.expovariate(1 / (_SECONDS + usual)), self._kill
            )
            self._timer.start()

    def _kill(self) -> None:
        self._began, self._is_starting = time.time(), False
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._draw.choice(list(self._pids.values())), signal.SIGKILL)
            self.made += 1

    def stop(self) -> None:
        """Kills nobody any more: the run has ended."""
        if self._timer is not None:
            self._timer.cancel()


@dataclass(frozen=True)
class Drill:
    """Outcome of a run with kills, beside one without.

    Attributes:
        killer: Killer of its processes.
        found: Result of the run.
        weights_equal: Whether its weights are those of the other, to the bit.
        history_equal: Whether its history is.
        most: Steps that a kill may cost.
    """

    killer: Killer
    found: isotrain.RunResult
    weights_equal: bool
    history_equal: bool
    most: int

    @property
    def lost(self) -> list[int]:
        """Steps that each restart took again."""
        return [each["after_step"] - each["from_step"] for each in self.found.restarts]

    def faults(self) -> Iterator[str]:
        """Faults of the run, as text."""
        if not self.weights_equal:
            yield "WEIGHTS NOT EQUAL"
        if not self.history_equal:
            yield "HISTORY NOT EQUAL"
        if max(self.lost, default=0) > self.most:
            yield f"A KILL COST MORE THAN {self.most} STEPS"
        if self.killer.forgotten:
            yield f"{self.killer.forgotten} COMPLETE CHECKPOINTS LOST"

    def summary(self) -> str:
        """All of it in one line."""
        lost, again = self.lost or [0], self.killer.restarts
        seconds = f"{statistics.median(again):.2f} s, median of {len(again)}" if again else "-"
        return (
            f"{self.killer.made} of {self.killer.wanted} kills, {len(self.lost)} restarts;"
            f" a checkpoint every {_EVERY} steps;"
            f" steps lost: most {max(lost)}, median {statistics.median(lost):g}, more than {_EVERY} in"
            f" {sum(each > _EVERY for each in lost)}; from a kill to the next step: {seconds};"
            f" {', '.join(self.faults()) or 'bit-equal'}"
        )


def drill(
    backend: str,
    kills: int,
    steps: int,
    seed: int,
    *,
    strategy: Mapping[str, Any] = DATA_PARALLEL,
    background: bool = True,
    record: bool = False,
) -> Drill:
    """Runs once undisturbed and once with kills, and compares."""
    spec = training(steps * kills, strategy, record)
    options: dict[str, Any] = {"backend": backend, "replicas": REPLICAS}
    with tempfile.TemporaryDirectory() as folder:
        options["output"] = Path(folder, "whole")
        whole = isotrain.run(spec, on_event=lambda event: None, **options)
        options["output"] = Path(folder, "killed")
        killer = Killer(kills, seed)
        options |= {"on_event": killer.on_event, "max_restarts": 2 * kills}
        try:
            found = isotrain.run({**spec, **disturbed(background)}, **options)
        finally:
            killer.stop()
        same = all(np.array_equal(found.weights[n], w) for n, w in whole.weights.items())
        history = found.history == whole.history
    return Drill(killer, found, same, history, _EVERY * (2 if background else 1))


def main(given: argparse.Namespace) -> int:
    """Drills each strategy on each backend; gives the exit code."""
    code = 0
    for backend, strategy in itertools.product(given.backend, given.strategy):
        cell = f"{backend}, {StrategyChoice.of(strategy).label}, seed {given.seed}"
        try:
            done = drill(
                backend,
                given.kills,
                given.steps,
                given.seed,
                strategy=strategy,
                background=not given.wait,
                record=given.record,
            )
        except isotrain.IsotrainError as error:
            print(f"{cell}: FAILED: {error}", flush=True)
            code = 1
            continue
        print(f"{cell}: {done.summary()}", flush=True)
        code = max(code, int(any(done.faults())))
    return code


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--backend", nargs="+", default=["reference"])
    parser.add_argument("--strategy", nargs="+", type=name_with_options, default=[DATA_PARALLEL])
    parser.add_argument("--wait", action="store_true")
    parser.add_argument("--record", action="store_true")
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=150)
    sys.exit(main(parser.parse_args()))
