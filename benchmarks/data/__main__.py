"""Loaders by hand and isotrain's: samples per second, and processor time per sample.

    python -m benchmarks.data                        # all workloads, with few of their samples
    python -m benchmarks.data --goals --minutes 20   # and which goals are reached
    python -m benchmarks.data --workload images --replicas 1 --workers 2 --rounds 5

Every run is a program of its own; runs of a round follow each other in a random order, and ratios are taken
within a round. The first and the last epoch of a run are not timed. Reported are medians with 95 % bootstrap
intervals.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from math import inf
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from benchmarks.data.contenders import CONTENDERS, Contender
from benchmarks.data.job import Job
from benchmarks.data.promises import Promise, promises
from benchmarks.data.workloads import SAMPLES, SCALES, workload
from benchmarks.peers import environment
from benchmarks.statistics import Estimate, median

_ROOT = Path(__file__).resolve().parents[2]
_LIMIT_SECONDS = 1800


@dataclass(frozen=True)
class Cell:
    """A contender on a workload with a number of replicas."""

    contender: Contender
    workload: str
    replicas: int

    def __str__(self) -> str:
        return f"{self.workload}, {self.replicas} x {self.contender.name}"


@dataclass(frozen=True)
class Measured:
    """Figures of one run.

    Attributes:
        rate: Samples per second.
        processor: Processor time per sample, in milliseconds, of all processes.
        reads: Records of the stream that were read for each that was trained on; 0 where none is counted.
    """

    rate: float
    processor: float
    reads: float


def main() -> int:
    """Measures what was asked for; 1 where a contender fails."""
    options, began = _options(), time.monotonic()
    contenders = [each for each in CONTENDERS if environment.is_there() or not each.is_peer]
    if len(contenders) < len(CONTENDERS):
        print(
            "left out: accelerate and fabric, which `python -m benchmarks.peers --setup` installs",
            file=sys.stderr,
        )
    cells = [
        Cell(contender, name, replicas)
        for name in options.workload or SAMPLES
        for replicas in map(int, options.replicas.split(","))
        for contender in contenders
        if name in contender.workloads and replicas <= contender.replicas
    ]
    for name in {cell.workload for cell in cells}:
        print(f"files: {workload(name, _scale(name, options)).folder}", file=sys.stderr)
    generator = np.random.default_rng(options.seed)
    runs: dict[Cell, list[Measured]] = {cell: [] for cell in cells}
    kept = list(promises()) if options.goals and not options.workload else []
    with contextlib.suppress(KeyboardInterrupt):
        for number in range(options.rounds):
            if number and (number + 1) / number * (time.monotonic() - began) > 60 * options.minutes:
                break
            for index in generator.permutation(len(cells)):
                cell = cells[index]
                measured = _run(cell, options)
                runs[cell].append(measured)
                text = f"{measured.rate:.0f} samples/s, {measured.processor:.3f} ms per sample"
                print(f"{number + 1}/{options.rounds} {cell}: {text}", file=sys.stderr, flush=True)
    print(table(runs))
    if options.goals:
        print(goals(runs, kept))
    return 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--workload", action="append", choices=list(SAMPLES))
    parser.add_argument("--replicas", default="1,2", help="such as 1,2")
    parser.add_argument("--workers", type=int, default=2, help="worker processes on the host")
    parser.add_argument(
        "--scale", type=float, help="fraction of the samples; else few of each workload"
    )
    parser.add_argument("--epochs", type=int, default=4, help="two of them are not timed")
    parser.add_argument("--rounds", type=int, default=5, help="runs of each contender")
    parser.add_argument(
        "--minutes", type=float, default=inf, help="begin no round that takes longer"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the order of the runs")
    parser.add_argument(
        "--goals",
        action="store_true",
        help="say which goals are reached; of all workloads, also which promises are kept",
    )
    return parser.parse_args()


def _scale(name: str, options: argparse.Namespace) -> float:
    """The fraction of a workload's samples."""
    return SCALES[name] if options.scale is None else float(options.scale)


def _run(cell: Cell, options: argparse.Namespace) -> Measured:
    """Runs a contender once."""
    with TemporaryDirectory() as folder:
        job = Job(
            cell.workload,
            _scale(cell.workload, options),
            cell.replicas,
            options.workers,
            options.epochs,
            folder,
            cell.contender.options,
        )
        variables = {**os.environ, **job.variables(), "PYTHONPATH": str(_ROOT)}
        variables |= {"TF_CPP_MIN_LOG_LEVEL": "2", "CUDA_VISIBLE_DEVICES": "-1"}
        command = cell.contender.command(cell.replicas)
        done = subprocess.run(
            command,
            env=variables,
            cwd=_ROOT,
            timeout=_LIMIT_SECONDS,
            capture_output=True,
            text=True,
            check=False,
        )
        times = Path(folder, "times.json")
        if done.returncode or not times.exists():
            raise SystemExit(f"{cell}: ended with {done.returncode}.\n{done.stderr[-3000:]}")
        seen, reads = json.loads(times.read_text()), Path(folder, "reads")
        samples = job.timed_samples
        read = reads.stat().st_size / (job.work.samples * job.epochs) if reads.exists() else 0.0
    return Measured(samples / seen["wall"], 1e3 * seen["processor"] / samples, read)


def _reference(runs: dict[Cell, list[Measured]], cell: Cell) -> Cell | None:
    """The fastest of the contenders that a cell is compared to, by the median; None without any."""
    alike = [
        other
        for other, measured in runs.items()
        if (other.workload, other.replicas) == (cell.workload, cell.replicas)
        and other.contender.name in cell.contender.references
        and measured
    ]
    rates = {other: np.median([each.rate for each in runs[other]]) for other in alike}
    return max(rates, key=rates.__getitem__, default=None)


def _ratio(runs: dict[Cell, list[Measured]], cell: Cell, reference: Cell) -> Estimate:
    """Samples per second as a multiple of the reference's, taken within each round."""
    pairs = zip(runs[cell], runs[reference], strict=False)
    return median(np.array([own.rate / by_hand.rate for own, by_hand in pairs]))


def table(runs: dict[Cell, list[Measured]]) -> str:
    """The figures as a Markdown table."""
    lines = [
        "| workload | replicas | contender | samples per second | times the fastest | processor ms per sample"
        " | records read |",
        "|---|---|---|---|---|---|---|",
    ]
    for cell, measured in runs.items():
        if not measured:
            continue
        rate = median(np.array([each.rate for each in measured])).text(digits=0)
        processor = median(np.array([each.processor for each in measured])).text()
        reference, ratio = _reference(runs, cell), ""
        if reference is not None:
            ratio = f"{_ratio(runs, cell, reference).text(digits=2)} of {reference.contender.name}"
        texts = [rate, ratio, processor]
        reads = f"{measured[0].reads:.2f}" if measured[0].reads else ""
        names = [cell.workload, str(cell.replicas), cell.contender.name]
        lines.append(f"| {' | '.join([*names, *texts, reads])} |")
    return "\n".join(lines)


def goals(runs: dict[Cell, list[Measured]], kept: Iterable[Promise]) -> str:
    """Figures and bounds of the goals and promises, as a Markdown table; reached where the median is."""
    rows = ["| goal | figure | reached |", "|---|---|---|"]
    for text, figure, bound, is_least in _goal_figures(runs):
        reached = figure.value >= bound if is_least else figure.value <= bound
        words = "at least" if is_least else "at most"
        rows.append(
            f"| {text}: {words} {bound} | {figure.text(digits=2)} | {'yes' if reached else 'no'} |"
        )
    rows += [f"| {each.text} | {each.seen} | {'yes' if each.is_kept else 'no'} |" for each in kept]
    return "\n".join(rows)


def _goal_figures(
    runs: dict[Cell, list[Measured]],
) -> Iterator[tuple[str, Estimate, float, bool]]:
    """The text, figure and bound of each goal, and whether the bound is the least that is to be reached."""
    for cell, measured in runs.items():
        name = cell.contender.name
        if not name.startswith("isotrain") or not measured:
            continue
        if (reference := _reference(runs, cell)) is not None:
            ratio, bound = _ratio(runs, cell, reference), 1.5 if "by-length" in name else 0.98
            yield f"{cell}, samples per second to {reference.contender.name}", ratio, bound, True
        is_loading = cell.contender.options.endswith("no-steps")
        if (
            is_loading
            and cell.replicas == 2
            and runs.get(one := Cell(cell.contender, cell.workload, 1))
        ):
            pairs = zip(measured, runs[one], strict=False)
            processor = median(np.array([two.processor / each.processor for two, each in pairs]))
            yield f"{cell}, processor time per sample to 1 replica", processor, 1.05, False
        if measured[0].reads:
            reads = median(np.array([each.reads for each in measured]))
            yield f"{cell}, records read per record", reads, 1.0, False


if __name__ == "__main__":
    sys.exit(main())
