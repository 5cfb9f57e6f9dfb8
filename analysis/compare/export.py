"""Cells as rows of a flat table: for CSV files and data frames."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from typing import Any

from isotrain.analysis.compare.records import ESTIMATES, Cell, Estimate

_PLAIN = ("name", "backend", "collective", "replicas", "strategy", "python", "status", "reason")
_NUMBERS = ("exchanged_bytes", "final_loss", "loss_difference")


def rows(cells: Sequence[Cell]) -> list[dict[str, Any]]:
    """One row per cell, with the same columns in each; what a cell lacks is None.

    An estimate takes three columns: its name, and that with `_low` and `_high`. A metric's column is
    `metric_<name>`.
    """
    metrics = sorted({name for cell in cells for name in cell.metrics})
    return [_row(cell, metrics) for cell in cells]


def _row(cell: Cell, metrics: Sequence[str]) -> dict[str, Any]:
    row = {name: getattr(cell, name) for name in _PLAIN}
    row["runs"] = len(cell.repeats)
    for name in ESTIMATES:
        found: Estimate | None = getattr(cell, name)
        row[name] = found and found.value
        row[f"{name}_low"] = found and found.low
        row[f"{name}_high"] = found and found.high
    row |= {name: getattr(cell, name) for name in _NUMBERS}
    row |= {f"metric_{name}": cell.metrics.get(name) for name in metrics}
    row["notes"] = "; ".join(cell.notes)
    return row


def csv_text(cells: Sequence[Cell]) -> str:
    """The rows as CSV."""
    found = rows(cells)
    stream = io.StringIO()
    writer = csv.DictWriter(stream, list(found[0]) if found else [], lineterminator="\n")
    writer.writeheader()
    writer.writerows(found)
    return stream.getvalue()
