"""Whether an elastic run whose processes are killed, and which others join, ends as one that was left alone.

At random moments a random process is killed with SIGKILL, also while it starts, waits to join or takes the
state, or a replica is added as by `isotrain join`. At least one process that has the state is left alive.
Lost processes are replaced. The run must take every step once, and end with the weights of a run that was
left alone: to the bit with `--bits` (`reproducible: bits` in the spec), else to rounding.

A pause is from the end of the last step of a process group to the end of the first step of the next one.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import signal
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

import isotrain
from benchmarks.kills import slowly, training
from isotrain.core.launching.supervision.join_requests import request_join

REPLICAS = 3
_MOST = 5
_JOIN_SHARE = 0.2
"""Share of the disturbances that are requests to join."""
_TOLERANCE = 1e-9
"""Largest difference of a weight or a loss to those of the run that was left alone, without `--bits`."""


def network() -> Any:
    """Network without dropout: the reference backend cannot draw by sample."""
    from isotrain.testing.reference.layers import Dense
    from isotrain.testing.reference.network import Network

    return Network([Dense(4, 32, "tanh", name="hidden"), Dense(32, 3, name="head")])


class Pauses:
    """Callback that writes, for the first step of each process group, when it ended and the one before."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._is_first = False

    def on_start(self, session: isotrain.Session) -> None:
        self._is_first = True

    def on_step(self, session: isotrain.Session, batch: Any, loss: Any) -> None:
        now = time.time()
        before = session.notes.get("ended")
        session.notes["ended"] = now
        if self._is_first and before is not None and session.is_main:
            with self._path.open("a") as lines:
                lines.write(json.dumps([before, now]) + "\n")
        self._is_first = False


class Disturber:
    """Kills processes of the run and adds replicas, until it has done so often enough.

    Attributes:
        wanted: Number of processes to kill.
        kills: Times of the kills of members.
        killed_newcomers: Number of kills of processes that had not joined.
        joins: Number of replicas that joined on request.
        refused: Number of such requests that were refused, or whose replica was killed before.
        changes: Number of process groups after the first.
        lost: Number of processes that the run reported as lost.
    """

    def __init__(self, kills: int, seed: int, seconds: float, folder: Path) -> None:
        self.wanted = kills
        self.kills: list[float] = []
        self.killed_newcomers = 0
        self.joins = self.refused = self.changes = self.lost = 0
        self._draw = random.Random(seed)
        self._seconds = seconds
        self._folder = folder
        self._pids: dict[int, int] = {}
        self._members: Sequence[int] = range(REPLICAS)
        self._has_state: set[int] = set(range(REPLICAS))
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._disturb)
        self._requests: list[threading.Thread] = []

    def on_event(self, event: Mapping[str, Any]) -> None:
        """Learns who is there."""
        with self._lock:
            match event["event"]:
                case "started":
                    self._pids[event["rank"]] = event["pid"]
                case "ready":
                    self._has_state.add(self._members[event["rank"]])
                case "members changed":
                    self.changes += 1
                    self.lost += len(event["lost"])
                    self._members = event["members"]
                case "steps" if not self._thread.ident:
                    self._thread.start()

    def _disturb(self) -> None:
        while not self._ended.wait(self._draw.expovariate(1 / self._seconds)):
            if self._draw.random() < _JOIN_SHARE:
                self._requests.append(threading.Thread(target=self._join))
                self._requests[-1].start()
            elif self.made < self.wanted:
                with self._lock:
                    self._kill()
            else:
                return

    @property
    def made(self) -> int:
        """Number of processes killed."""
        return len(self.kills) + self.killed_newcomers

    def _kill(self) -> None:
        """Kills a process, but not the last one that has the state."""
        alive = sorted(self._pids)
        rank = self._draw.choice(alive)
        if self._has_state & set(alive) == {rank}:
            return
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._pids[rank], signal.SIGKILL)
            if rank in self._members:
                self.kills.append(time.time())
            else:
                self.killed_newcomers += 1
        del self._pids[rank]

    def _join(self) -> None:
        answers = [{"failed": "no run"}]
        with contextlib.suppress(OSError):
            answers = list(request_join(self._folder))
        if answers and "joined" in answers[-1]:
            self.joins += 1
        else:
            self.refused += 1

    def stop(self) -> None:
        """Disturbs no more: the run has ended."""
        self._ended.set()
        for thread in (self._thread, *self._requests):
            if thread.ident:
                thread.join()


@dataclass(frozen=True)
class Outcome:
    """A disturbed run beside one that was left alone.

    Attributes:
        disturber: What was done to it.
        difference: Largest difference of a weight or a loss.
        steps: Number of steps in its history, and that of the other.
        pauses: Begin and end of each pause.
        seconds: Duration of its training, from the first step to the end.
    """

    disturber: Disturber
    difference: float
    steps: tuple[int, int]
    pauses: list[tuple[float, float]]
    seconds: float

    def faults(self, tolerance: float) -> Iterator[str]:
        """Faults of the run, as text."""
        if self.steps[0] != self.steps[1]:
            yield f"{self.steps[0]} STEPS INSTEAD OF {self.steps[1]}"
        if not self.difference <= tolerance:
            yield f"DIFFERS BY {self.difference:g}"

    def summary(self, tolerance: float) -> str:
        """All of it in one line."""
        told = self.disturber
        after = [
            min(end - kill for _, end in self.pauses if end > kill)
            for kill in told.kills
            if any(end > kill for _, end in self.pauses)
        ]
        killed = statistics.median(after) if after else float("nan")
        slow = max(after, default=float("nan"))
        pauses = [end - begin for begin, end in self.pauses] or [0.0]
        pause, trained = statistics.median(pauses), 100 * (1 - sum(pauses) / self.seconds)
        return (
            f"{told.made} kills ({told.killed_newcomers} of processes that had not joined), {told.lost} lost,"
            f" {told.joins} joined on request, {told.changes} new groups, {self.steps[0]} steps;"
            f" SIGKILL to the next step: median {killed:.2f} s, most {slow:.2f} s, of {len(after)};"
            f" pauses: median {pause:.2f} s, {trained:.1f} % of {self.seconds:.0f} s trained;"
            f" {', '.join(self.faults(tolerance)) or f'equal (difference {self.difference:g})'}"
        )


def disturb(
    backend: str, kills: int, steps: int, seed: int, seconds: float, *, bits: bool = False
) -> Outcome:
    """Runs once undisturbed and once with kills and joins, and compares."""
    spec = training(steps * kills) | {"precision": "float64"}
    if backend in ("numpy", "reference"):
        spec |= {"model": {"numpy": network}, "model_args": {}}
    else:
        spec["random_layers"] = "per-sample"
    spec |= {"reproducible": "bits"} if bits else {}
    options: dict[str, Any] = {"backend": backend, "replicas": REPLICAS}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder)
        options["output"] = path / "whole"
        whole = isotrain.run(spec, on_event=lambda event: None, **options)
        options["output"] = path / "disturbed"
        disturber = Disturber(kills, seed, seconds, path / "disturbed")
        elastic = {"min": 1, "max": _MOST, "replacements": 10 * kills}
        changes = {"elastic": elastic, "callbacks": [Pauses(path / "pauses")], "transform": slowly}
        try:
            found = isotrain.run({**spec, **changes}, on_event=disturber.on_event, **options)
        finally:
            disturber.stop()
        ended = time.time()
        lines = (path / "pauses").read_text().splitlines() if disturber.changes else []
        pauses = [json.loads(line) for line in lines]
        weights, losses, expected = found.weights, found.history.loss, whole.history.loss
        differences = [abs(weights[name] - each).max() for name, each in whole.weights.items()]
    counts = len(losses), len(expected)
    both = min(counts)
    differences.append(np.abs(np.subtract(losses[:both], expected[:both])).max())
    took = ended - pauses[0][0] if pauses else float("nan")
    return Outcome(disturber, float(np.max(differences)), counts, pauses, took)


def main(given: argparse.Namespace) -> int:
    """Disturbs a run on each backend; gives the exit code."""
    code, tolerance = 0, 0.0 if given.bits else _TOLERANCE
    for backend in given.backend:
        cell = f"{backend}, seed {given.seed}"
        try:
            done = disturb(
                backend, given.kills, given.steps, given.seed, given.every, bits=given.bits
            )
        except isotrain.IsotrainError as error:
            print(f"{cell}: FAILED: {error}", flush=True)
            code = 1
            continue
        print(f"{cell}: {done.summary(tolerance)}", flush=True)
        code = max(code, int(any(done.faults(tolerance))))
    return code


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--backend", nargs="+", default=["reference"])
    parser.add_argument("--bits", action="store_true", help="compare bits (reproducible: bits)")
    parser.add_argument("--kills", type=int, default=20, help="number of kills (20)")
    parser.add_argument("--steps", type=int, default=150, help="steps for each kill (150)")
    parser.add_argument("--every", type=float, default=0.8, help="mean seconds between two (0.8)")
    parser.add_argument("--seed", type=int, default=0)
    sys.exit(main(parser.parse_args()))
