"""Whether healthy runs ever fail: many short ones in a row on each backend, beside a load on every core.

What may go wrong here is the start and the end of a run, when processes meet and part, and most of all on a
machine that has no time for them. `python -m benchmarks.in_a_row [--runs N] [--backends A,B] [--load N]`:
prints a line for each failure and a table; ends with 1 where a run has failed.
"""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import os
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import isotrain
from benchmarks import workload

_BACKENDS = "torch-ddp,tf-mirrored,tf-multiworker,horovod-torch,horovod-tf"
_STEPS = 4
_SAMPLES = 256
"""Samples that are evaluated at the end."""
_PATIENCE = 3600.0
"""Seconds for a call: on a machine that has no time for it, it takes as long as it takes."""


def main() -> int:
    """Runs them, the backends in alternation, and prints what came of them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--backends", default=_BACKENDS)
    parser.add_argument("--runs", type=int, default=40, help="on each backend")
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--load", type=int, default=os.cpu_count(), help="busy processes besides")
    given = parser.parse_args()
    backends = given.backends.split(",")
    with _busy(given.load):
        tallies = _all_runs(backends, given.runs, given.replicas)
    return _report(tallies)


def _all_runs(backends: Sequence[str], runs: int, replicas: int) -> dict[str, list[float]]:
    """Seconds of each run by backend; not a number for one that failed."""
    tallies: dict[str, list[float]] = {backend: [] for backend in backends}
    for number in range(runs):
        for backend, seconds in tallies.items():
            seconds.append(_seconds(backend, replicas))
            told = "failed" if seconds[-1] != seconds[-1] else f"{seconds[-1]:.1f} s"
            print(f"{number + 1} {backend}: {told}, load {os.getloadavg()[0]:.1f}", flush=True)
    return tallies


def _seconds(backend: str, replicas: int) -> float:
    """Duration of one run in seconds, from the call to its result."""
    limits = {"start": _PATIENCE, "progress": _PATIENCE}
    began = time.monotonic()
    with TemporaryDirectory() as folder:
        try:
            isotrain.run(
                {
                    **workload.spec("small", steps=_STEPS),
                    "data": data,
                    "metrics": ["accuracy"],
                    "timeouts": limits,
                },
                backend=backend,
                replicas=replicas,
                output=Path(folder) / "run",
                on_event=lambda event: None,
            )
        except isotrain.IsotrainError as error:
            print(f"{backend}: {error}", flush=True)
            return float("nan")
    return time.monotonic() - began


def data() -> isotrain.DataSet:
    """Gives samples to train with, and a few to evaluate."""
    inputs, targets = workload.arrays()
    return isotrain.DataSet((inputs, targets), validation=(inputs[:_SAMPLES], targets[:_SAMPLES]))


@contextlib.contextmanager
def _busy(count: int) -> Iterator[None]:
    """Keeps so many processes busy until all runs are done."""
    context = multiprocessing.get_context("spawn")
    processes = [context.Process(target=_spin, daemon=True) for _ in range(count)]
    for process in processes:
        process.start()
    try:
        yield
    finally:
        for process in processes:
            process.terminate()


def _spin() -> Any:
    while True:
        pass


def _report(tallies: dict[str, list[float]]) -> int:
    """Prints a row for each backend; gives 1 where a run has failed."""
    failed = 0
    print(f"{'backend':16}{'runs':>6}{'failed':>8}{'median':>10}{'longest':>10}")
    for backend, seconds in tallies.items():
        whole = [each for each in seconds if each == each]
        failed += len(seconds) - len(whole)
        spread = f"{statistics.median(whole):8.1f} s{max(whole):8.1f} s" if whole else ""
        print(f"{backend:16}{len(seconds):6}{len(seconds) - len(whole):8}{spread}")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
