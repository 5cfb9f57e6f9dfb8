"""Conversion of cells to rows of a flat table, for CSV files and data frames."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from typing import Any

from isotrain.analysis.compare.records import ESTIMATES, Cell, Estimate

_PLAIN = ("name", "backend", "collective", "replicas", "strategy", "python", "status", "reason")
_NUMBERS = ("exchanged_bytes", "final_loss", "loss_difference")


def rows(cells: Sequence[Cell]) -> list[dict[str, Any]]:
    """One row per cell, all with the same columns; missing values are None.

    An estimate takes three columns: its name, and that with `_low` and `_high`. A metric's column is
    `metric_<name>`.
    """
    metrics = sorted({name for cell in cells for name in cell.metrics})
    return [_row(cell, metrics) for cell in cells]


def _row(cell: Cell, metrics: Sequence[str]) -> dict[str, Any]:
    row = {name: getattr(cell, name) for name in _PLAIN}
    row["runs"] = len(cell.repeats)
    for name in ESTIMATES:
        estimate: Estimate | None = getattr(cell, name)
        row[name] = estimate and estimate.value
        row[f"{name}_low"] = estimate and estimate.low
        row[f"{name}_high"] = estimate and estimate.high
    row |= {name: getattr(cell, name) for name in _NUMBERS}
    row |= {f"metric_{name}": cell.metrics.get(name) for name in metrics}
    row["notes"] = "; ".join(cell.notes)
    return row


def csv_text(cells: Sequence[Cell]) -> str:
    """The rows as CSV."""
    table = rows(cells)
    stream = io.StringIO()
    writer = csv.DictWriter(stream, list(table[0]) if table else [], lineterminator="\n")
    writer.writeheader()
    writer.writerows(table)
    return stream.getvalue()
