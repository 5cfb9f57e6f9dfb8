"""The demo of `make demo`: the digits under all five backends, how far the results differ, and a
comparison of the backends as a page to look at.

    python examples/demo.py
    python examples/demo.py --backends torch-ddp tf-mirrored --replicas 1 2 3 --repeats 3
    python examples/demo.py --resume    # adds backends installed since to the last report

Exit code 0: every cell trained, and all loss curves agree. 1: one failed, or they do not.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from digits import spec

import isotrain

BACKENDS = ("torch-ddp", "tf-mirrored", "tf-multiworker", "horovod-torch", "horovod-tf")
TOLERANCE = 1e-4
"""Relative. Rounding in float32 gives about 1e-6 here; other data or another mean, far more."""


@dataclass
class Cell:
    """One backend with one number of replicas, and what came of it."""

    backend: str
    replicas: int
    final_loss: float | None = None
    accuracy: float | None = None
    apart: float | None = None
    reason: str | None = None


def train(cell: Cell, epochs: int, quiet: bool) -> list[float]:
    """Fills a cell; returns the loss of every step, or nothing if the run failed."""
    own = spec.replace(epochs=epochs, threads=1)  # speeds can be compared: one core per replica
    show = (lambda event: None) if quiet else None
    try:
        result = isotrain.run(own, backend=cell.backend, replicas=cell.replicas, on_event=show)
    except isotrain.IsotrainError as error:
        cell.reason = str(error)
        print(cell.reason, file=sys.stderr)
        return []
    cell.final_loss = result.final_loss
    cell.accuracy = result.metrics["validation_accuracy"]
    return result.history.loss


def largest_difference(curve: Sequence[float], reference: Sequence[float]) -> float:
    """The largest relative difference between two loss curves."""
    return max(abs(a - b) / abs(b) for a, b in zip(curve, reference, strict=True))


def conclusion(cells: Sequence[Cell]) -> tuple[bool, str]:
    """Whether all is well, and a sentence that says what the table shows."""
    apart = {f"{c.backend} x {c.replicas}": c.apart for c in cells if c.apart is not None}
    failed = len(cells) - len(apart)
    note = f" {failed} of {len(cells)} cells failed." if failed else ""
    if len(apart) < 2:
        return not failed, f"Fewer than two cells trained: nothing to compare.{note}"
    where = max(apart, key=lambda name: apart[name])
    widest = f"at most {apart[where]:.1e} apart ({where}), relative to the first cell"
    if apart[where] > TOLERANCE:
        return False, f"The loss curves do NOT agree: they are {widest}.{note}"
    return not failed, (
        "The same weights, batches and learning rates in every cell that trained: step by step, the"
        f" losses are {widest}, which float32 rounding explains.{note}"
    )


def print_table(cells: Sequence[Cell]) -> None:
    """Prints a row for every cell, and below the table why cells failed."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(title="handwritten digits, one core per replica")
    table.add_column("backend")
    for name in ("replicas", "final loss", "accuracy", "curves apart"):
        table.add_column(name, justify="right")
    for cell in cells:
        table.add_row(cell.backend, str(cell.replicas), *facts(cell))
    failed = [cell for cell in cells if cell.reason]
    table.caption = Text("\n".join(f"{c.backend}, {c.replicas}: {first_line(c)}" for c in failed))
    table.caption_justify = "left"
    Console().print(table)


def facts(cell: Cell) -> list[str]:
    """The other columns of a cell's row."""
    if cell.reason:
        return ["failed"]
    apart = f"{cell.apart:.1e}" if cell.apart else "0"
    return [f"{cell.final_loss:.6f}", f"{cell.accuracy:.4f}", apart]


def first_line(cell: Cell) -> str:
    """The gist of why a cell failed; all of it was printed when it did."""
    return (cell.reason or "").splitlines()[0]


def report(args: argparse.Namespace, backends: Sequence[str]) -> Path:
    """Measures the backends side by side; returns the path of the page that tells of it.

    Those that are not installed have a row too, with the reason, and can be measured later by `--resume`.
    """
    folder = Path("comparisons") / time.strftime("demo-%Y%m%d-%H%M%S")
    if args.resume:
        folder = max(Path("comparisons").glob("demo-*"), default=folder)
    print(f"\nmeasuring every cell by itself, {args.repeats} x:", file=sys.stderr)
    isotrain.compare(
        spec.replace(epochs=args.epochs, threads=1),
        backends=backends,
        replicas=args.replicas,
        repeats=args.repeats,
        **{"resume" if folder.exists() else "output": folder},
        on_progress=lambda line: print(line, file=sys.stderr, flush=True),
    )
    return (folder / "report.html").resolve()


def thorough_comparison(backends: Sequence[str], replicas: Sequence[int]) -> str:
    """The command that measures as `report` does, often enough to tell which backend is fastest."""
    program, file = (
        os.path.relpath(path.with_name(name))
        for path, name in ((Path(sys.executable), "isotrain"), (Path(__file__), "digits.yaml"))
    )
    named = [word for backend in backends for word in ("--backend", backend)]
    counts = ",".join(map(str, replicas))
    return shlex.join([program, "compare", file, *named, "--replicas", counts, "--repeats", "3"])


def installed() -> list[str]:
    """The backends that can be used here; says why the others are left out."""
    found = []
    for backend in BACKENDS:
        try:
            isotrain.plan(spec, backend=backend, replicas=1)
            found.append(backend)
        except isotrain.BackendUnavailableError as error:
            print(f"left out: {error}", file=sys.stderr)
    return found


def main() -> int:
    """Trains every cell, prints what came out, and reports on their speed."""
    parser = argparse.ArgumentParser(description="Train the digits under every backend.")
    parser.add_argument("--backends", nargs="+", metavar="NAME", help="those installed")
    parser.add_argument("--replicas", nargs="+", type=int, default=(1, 2), metavar="N")
    parser.add_argument("--epochs", type=int, default=spec.epochs)
    parser.add_argument(
        "--repeats",
        type=int,
        default=1,
        help="runs per cell of the comparison; 0: none is made (1)",
    )
    parser.add_argument("--resume", action="store_true", help="go on with the last report")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    args = parser.parse_args()

    backends = args.backends or installed()
    cells = [Cell(backend, count) for backend in backends for count in args.replicas]
    reference: list[float] = []
    for cell in cells:
        curve = train(cell, args.epochs, quiet=args.json)
        reference = reference or curve
        if curve:
            cell.apart = largest_difference(curve, reference)
    agree, text = conclusion(cells)
    if args.json:
        print(json.dumps({"cells": [asdict(c) for c in cells], "agree": agree, "text": text}))
    else:
        print_table(cells)
        print(text, flush=True)
        trained = list(dict.fromkeys(cell.backend for cell in cells if cell.apart is not None))
        if args.repeats and trained:
            page = report(args, trained if args.backends else BACKENDS)
            print(f"\nThe backends side by side (open it in a browser):\n  {page}")
            print(
                "\nOne run of each tells little about speed. Which is fastest, three of each tell:"
            )
            print(f"  {thorough_comparison(trained, args.replicas)}")
    return 0 if agree else 1


if __name__ == "__main__":
    sys.exit(main())
