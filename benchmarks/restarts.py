"""Time from the kill of a replica to the run's next step, beside a first start.

`python -m benchmarks.restarts [--backend NAME ...] [--rounds N]`: in each round a run starts, saves a
checkpoint, has a process killed, and goes on from there. Printed for each backend are the medians of the
seconds from the call to the first step, of those from the kill to the next step, and of the ratio of the two
in a round, with their 95 % bootstrap intervals. A round more at the start, in which the program imports the
framework, is not counted.
"""

from __future__ import annotations

import argparse
import os
import signal
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

import isotrain
from benchmarks import statistics
from benchmarks.kills import REPLICAS, disturbed, training

_STEPS = 60


class Watch:
    """Kills one process of a run when it has saved a checkpoint.

    Attributes:
        seconds: Durations from the call to the first step, and from the kill to the next one.
    """

    def __init__(self, victim: int) -> None:
        """Begins now.

        Args:
            victim: The rank of the process that is killed; of a run with fewer, counted on from 0.
        """
        self.seconds: list[float] = []
        self._victim = victim
        self._pids: dict[int, int] = {}
        self._began = time.time()
        self._is_starting, self._is_killed = True, False

    def on_event(self, event: Mapping[str, Any]) -> None:
        """Learns of processes, steps and checkpoints."""
        match event["event"]:
            case "started":
                self._pids[event["rank"]] = event["pid"]
            case "steps" if self._is_starting:
                self._is_starting = False
                self.seconds.append(event["time"] - self._began)
            case "checkpoint" if not self._is_killed:
                self._is_killed = True
                self._began = time.time()
                os.kill(self._pids[self._victim % len(self._pids)], signal.SIGKILL)
            case "restarted":
                self._is_starting = True


def timed(backend: str, victim: int) -> list[float]:
    """Seconds of a start and of a restart."""
    with TemporaryDirectory() as folder:
        watch = Watch(victim)
        isotrain.run(
            {**training(_STEPS), **disturbed()},
            backend=backend,
            replicas=REPLICAS,
            max_restarts=1,
            output=Path(folder, "run"),
            on_event=watch.on_event,
        )
    return watch.seconds


def main(backends: Sequence[str], rounds: int) -> None:
    """Measures and prints."""
    for backend in backends:
        found = np.array([timed(backend, number % 2) for number in range(rounds + 1)][1:])
        start, again, ratio = map(statistics.median, (*found.T, found[:, 1] / found[:, 0]))
        print(
            f"{backend}: first start {start.text(' s', 2)}; from the kill to the next step"
            f" {again.text(' s', 2)}: {ratio.text(' times', 2)}",
            flush=True,
        )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--backend", nargs="+", default=["torch-ddp"])
    parser.add_argument("--rounds", type=int, default=5)
    given = parser.parse_args()
    main(given.backend, given.rounds)
