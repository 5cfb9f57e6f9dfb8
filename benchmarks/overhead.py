"""What isotrain adds to a step, and to the time before the first one, against loops written by hand.

    python -m benchmarks.overhead                    # every backend, 1 and 2 replicas, both sizes
    python -m benchmarks.overhead --backend torch-ddp --replicas 1 --size small
    python -m benchmarks.overhead --first-step       # from the command to the end of the first step

Both loops run in the same processes, on the same process group, in alternating blocks whose order is
drawn anew for every pair; a block starts and ends with a barrier. Reported are the medians over the
pairs of the ratio and of the difference, with 95 % bootstrap intervals.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

import isotrain
from benchmarks import by_hand, first_step, statistics, workload

BACKENDS = ("torch-ddp", "tf-mirrored", "tf-multiworker", "horovod-torch", "horovod-tf")
_BLOCK_SECONDS = 0.15
_MORE_STEPS_THAN_NEEDED = 10**9


def measure(session: isotrain.Session, pairs: int) -> dict[str, list[float]]:
    """Times both loops on every process; returns seconds per step of each block."""
    plan = session.plan
    arguments = session.spec.model_args
    train = by_hand.for_backend(
        plan.backend,
        arguments["width"],
        arguments["depth"],
        session.rank,
        plan.replicas,
        session.group,
    )
    batches = session.batches()

    def train_with_isotrain(steps: int) -> None:
        for batch in itertools.islice(batches, steps):
            session.step(batch)

    loops = {"by_hand": train, "isotrain": train_with_isotrain}
    for loop in loops.values():
        loop(20)
    steps = _block_length(session, train)
    times: dict[str, list[float]] = {name: [] for name in loops}
    order = np.random.default_rng(0)
    for _ in range(pairs):
        for name in order.permutation(list(loops)):
            times[name].append(_timed(session, loops[name], steps))
    return times


def _block_length(session: isotrain.Session, train: by_hand.Train) -> int:
    """Steps of a block, the same on every process."""
    seconds = _timed(session, train, 10)
    tensor = session.group.tensor(np.array(seconds))
    same = session.group.all_reduce([tensor] * len(session.group.local_replicas), "max")[0]
    return max(5, round(_BLOCK_SECONDS / float(same)))


def _timed(session: isotrain.Session, train: by_hand.Train, steps: int) -> float:
    session.barrier()
    start = time.perf_counter()
    train(steps)
    session.group.synchronise_device()
    session.barrier()
    return (time.perf_counter() - start) / steps


def measured_cell(backend: str, replicas: int, size: str, pairs: int) -> dict[str, Any]:
    """Runs one cell in processes of its own."""
    with tempfile.TemporaryDirectory() as folder:
        times = isotrain.launch(
            functools.partial(measure, pairs=pairs),
            workload.spec(size, _MORE_STEPS_THAN_NEEDED),
            backend=backend,
            replicas=replicas,
            run_directory=Path(folder) / "run",
            on_event=lambda event: None,
        )[0]
    hand, ours = np.array(times["by_hand"]), np.array(times["isotrain"])
    return {
        "backend": backend,
        "replicas": replicas,
        "size": size,
        "by_hand_ms": float(np.median(hand)) * 1e3,
        "isotrain_ms": float(np.median(ours)) * 1e3,
        "ratio": statistics.median(ours / hand),
        "added_us": statistics.median((ours - hand) * 1e6),
    }


def print_cell(cell: dict[str, Any]) -> None:
    """Prints one line of the table."""
    print(
        f"{cell['backend']:15} {cell['replicas']} {cell['size']:6}"
        f" by hand {cell['by_hand_ms']:8.3f} ms  isotrain {cell['isotrain_ms']:8.3f} ms"
        f"  ratio {cell['ratio'].text()}  added {cell['added_us'].text(' us', 0)}",
        flush=True,
    )


def main() -> None:
    """Measures the cells that were asked for, and prints them."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--backend", action="append", choices=BACKENDS)
    parser.add_argument("--replicas", default="1,2", help="such as 1,2")
    parser.add_argument("--size", action="append", choices=list(workload.SIZES))
    parser.add_argument("--pairs", type=int, default=30, help="pairs of blocks per cell")
    parser.add_argument("--first-step", action="store_true", help="measure the start instead")
    parser.add_argument("--json", action="store_true", help="print one JSON object per cell")
    options = parser.parse_args()
    replicas = [int(number) for number in options.replicas.split(",")]
    if options.first_step:
        first_step.main(options.backend or ["torch-ddp", "tf-multiworker"], replicas, options.pairs)
        return
    for backend, count, size in itertools.product(
        options.backend or BACKENDS, replicas, options.size or list(workload.SIZES)
    ):
        cell = measured_cell(backend, count, size, options.pairs)
        if options.json:
            json.dump(cell, sys.stdout, default=vars)
            print(flush=True)
        else:
            print_cell(cell)


if __name__ == "__main__":
    main()
