"""The demo of `make demo`: the digits under all five backends, how far their losses are apart, and how
fast each is, as a table and as a page to look at.

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
from pathlib import Path
from typing import TYPE_CHECKING

from digits import spec

import isotrain

if TYPE_CHECKING:
    from isotrain.analysis.compare.records import Cell

BACKENDS = ("torch-ddp", "tf-mirrored", "tf-multiworker", "horovod-torch", "horovod-tf")
STEPS_PER_EPOCH = 24
"""1497 images in batches of 64."""
TOLERANCE = 1e-4
"""Relative. Rounding in float32 gives about 1e-6 here; other data or another mean, far more."""


def measure(args: argparse.Namespace) -> tuple[list[Cell], Path]:
    """Trains and times every cell in processes of its own; returns the cells and the folder of the report.

    Backends that are not installed have a row in the report too, and are added to it by `--resume`.
    """
    folder = Path("comparisons") / time.strftime("demo-%Y%m%d-%H%M%S")
    if args.resume:
        folder = max(Path("comparisons").glob("demo-*"), default=folder)
    comparison = isotrain.compare(
        spec.replace(epochs=args.epochs, threads=1),  # one core per replica: speeds can be compared
        backends=args.backends or BACKENDS,
        replicas=args.replicas,
        repeats=args.repeats,
        steps=args.epochs * STEPS_PER_EPOCH,  # the losses of all steps are compared
        **{"resume" if folder.exists() else "output": folder},
        on_progress=None if sys.stderr.isatty() or args.json else print_line,
        quiet=args.json,
    )
    return list(comparison.cells), folder.resolve()


def print_line(line: str) -> None:
    """Prints a line on the progress where there is no terminal, which has a spinner besides."""
    print(line, file=sys.stderr, flush=True)


def conclusion(cells: Sequence[Cell]) -> tuple[bool, str]:
    """Whether all is well, and a sentence that says what the table shows."""
    apart = {c.name: c.loss_difference for c in cells if c.loss_difference is not None}
    failed = sum(cell.status == "failed" for cell in cells)
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
    table.add_column("backend", no_wrap=True)
    for name in ("replicas", "validation loss", "accuracy", "curves apart", "samples/s"):
        table.add_column(name, justify="right")
    for cell in cells:
        table.add_row(cell.backend, str(cell.replicas), *facts(cell))
    failed = [cell for cell in cells if cell.status == "failed"]
    table.caption = Text("\n".join(f"{cell.name}: {first_line(cell)}" for cell in failed))
    table.caption_justify = "left"
    Console().print(table)


def facts(cell: Cell) -> list[str]:
    """The other columns of a cell's row."""
    if cell.samples_per_s is None or cell.loss_difference is None:
        return ["failed"]
    names = ("validation_loss", "validation_accuracy")
    metrics = [f"{cell.metrics[name]:.6f}" if name in cell.metrics else "-" for name in names]
    apart = f"{cell.loss_difference:.1e}" if cell.loss_difference else "0"
    return [*metrics, apart, f"{cell.samples_per_s.value:,.0f}"]


def first_line(cell: Cell) -> str:
    """The gist of why a cell failed; all of it is on the page."""
    return (cell.reason or "").splitlines()[0]


def thorough_comparison(backends: Sequence[str], replicas: Sequence[int]) -> str:
    """The command that measures as `measure` does, often enough to tell which backend is fastest."""
    program, file = (
        os.path.relpath(path.with_name(name))
        for path, name in ((Path(sys.executable), "isotrain"), (Path(__file__), "digits.yaml"))
    )
    named = [word for backend in backends for word in ("--backend", backend)]
    counts = ",".join(map(str, replicas))
    return shlex.join([program, "compare", file, *named, "--replicas", counts, "--repeats", "3"])


def show(cells: Sequence[Cell], text: str, page: Path, replicas: Sequence[int]) -> None:
    """Prints what came out, where the page is, and how to measure more thoroughly."""
    print_table(cells)
    print(text)
    print(f"\nThe backends side by side (open it in a browser):\n  {page}")
    if trained := list(dict.fromkeys(c.backend for c in cells if c.status == "finished")):
        print("\nOne run of each tells little about speed. Which is fastest, three of each tell:")
        print(f"  {thorough_comparison(trained, replicas)}")


def main() -> int:
    """Trains every cell, prints what came out, and makes a page of it."""
    parser = argparse.ArgumentParser(description="Train the digits under every backend.")
    parser.add_argument("--backends", nargs="+", metavar="NAME", help="those installed")
    parser.add_argument("--replicas", nargs="+", type=int, default=(1, 2), metavar="N")
    parser.add_argument("--epochs", type=int, default=spec.epochs)
    parser.add_argument("--repeats", type=int, default=1, help="runs of each cell (1)")
    parser.add_argument("--resume", action="store_true", help="go on with the last report")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    args = parser.parse_args()

    try:
        cells, folder = measure(args)
    except isotrain.IsotrainError as error:
        print(error, file=sys.stderr)
        return 1
    if not args.backends:  # one that is not installed was not asked for
        cells = [cell for cell in cells if cell.plan]
    agree, text = conclusion(cells)
    if args.json:
        fields = ("name", "status", "reason", "metrics", "loss_difference")
        told = [{field: getattr(cell, field) for field in fields} for cell in cells]
        print(json.dumps({"cells": told, "agree": agree, "text": text, "folder": str(folder)}))
    else:
        show(cells, text, folder / "report.html", args.replicas)
    return 0 if agree else 1


if __name__ == "__main__":
    sys.exit(main())
