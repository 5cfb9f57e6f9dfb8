"""The result of `isotrain.compare`: its records, as text, CSV, HTML or a data frame."""

from __future__ import annotations

import csv
import io
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from isotrain.analysis.compare import text
from isotrain.analysis.compare.records import (
    COMPARISON_FILE,
    ESTIMATES,
    FORMAT,
    Cell,
    Change,
    ComparisonRecord,
    Estimate,
)
from isotrain.analysis.compare.report.html import write_report
from isotrain.core.errors import IsotrainError
from isotrain.core.json_records import read_json, record
from isotrain.core.reporting.tables import data_frame

_PLAIN = ("name", "backend", "collective", "replicas", "strategy", "python", "status", "reason")
_NUMBERS = ("exchanged_bytes", "last_loss", "loss_difference")
_LATEST = 4e9
"""Seconds since 1970: in the year 2096."""
_MOST = 1e30
_MAX_REPLICAS = 10**6


class Comparison(ComparisonRecord):
    """All results of one comparison, with conversions to CSV, HTML and pandas."""

    def __repr__(self) -> str:
        """The tables that `isotrain compare` prints."""
        return text.result(self)

    def to_csv(self) -> str:
        """CSV text with a row per cell, interval ends in separate columns."""
        return csv_text(self.cells)

    def to_html(self, folder: str | os.PathLike[str]) -> Path:
        """Writes the report and its plots into a folder; returns the path of the report."""
        return write_report(self, Path(folder))

    def to_pandas(self) -> Any:
        """A `pandas.DataFrame` with a row per cell, as in `to_csv`.

        Raises:
            IsotrainError: pandas is not installed.
        """
        return data_frame(csv_rows(self.cells))

    def _repr_html_(self) -> str:
        """The table, for notebooks."""
        return text.html(self)


def from_dict(fields: Mapping[str, Any], where: str = "comparison") -> Comparison:
    """The inverse of `Comparison.to_dict`, validated; errors name the file `where`.

    Raises:
        IsotrainError: A field is missing, unknown or invalid; the message names it.
    """
    values = {name: value for name, value in fields.items() if name != "format"}
    comparison = record(Comparison, values, where)
    for field, fault in _faults(comparison):
        raise IsotrainError(f"{where}: {field}: {fault}.")
    return comparison


def _faults(comparison: Comparison) -> Iterator[tuple[str, str]]:
    """Yields field and error of values that have the right type but are inconsistent."""
    cells = {cell.name for cell in comparison.cells}
    if len(cells) < len(comparison.cells):
        yield "cells", "two of them have one name"
    named = {"reference": comparison.reference, "verdict: pick": comparison.verdict.pick}
    for field, name in [
        *named.items(),
        *(("verdict: tied", each) for each in comparison.verdict.tied),
    ]:
        if name is not None and name not in cells:
            yield field, f"there is no cell {name!r}"
    if not 0 <= comparison.created < _LATEST:
        yield "created", f"expected a time in seconds since 1970, received {comparison.created!r}"
    held: dict[str, Sequence[Cell | Change]] = {
        "cells": comparison.cells,
        "changes": comparison.changes,
    }
    for kind, holders in held.items():
        for index, holder in enumerate(holders):
            for name, fault in _faults_of(holder):
                yield f"{kind}[{index}]: {name}", fault


def _faults_of(holder: Cell | Change) -> Iterator[tuple[str, str]]:
    for name in ESTIMATES:
        estimate = getattr(holder, name, None)
        if estimate is not None and not 0 <= estimate.low <= estimate.high < _MOST:
            yield name, f"expected an interval of finite numbers from 0 on, received {estimate}"
    if isinstance(holder, Cell) and not 1 <= holder.replicas < _MAX_REPLICAS:
        yield "replicas", f"expected a number of replicas, received {holder.replicas}"


def read_comparison(path: Path) -> Comparison:
    """Reads a comparison from its folder, or from the JSON file itself.

    Raises:
        IsotrainError: The file is missing, is not a comparison, or has another format version.
    """
    file = path / COMPARISON_FILE if path.is_dir() else path
    try:
        fields = read_json(file)
    except FileNotFoundError:
        raise IsotrainError(
            f"there is no comparison at {file}; `isotrain compare SPEC --output DIR` writes one."
        ) from None
    if not isinstance(fields, dict) or fields.get("format") != FORMAT:
        version = fields.get("format") if isinstance(fields, dict) else type(fields).__name__
        raise IsotrainError(f"{file}: expected a comparison of format {FORMAT}, found {version!r}.")
    return from_dict(fields, str(file))


def csv_rows(cells: Sequence[Cell]) -> list[dict[str, Any]]:
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
    table = csv_rows(cells)
    stream = io.StringIO()
    writer = csv.DictWriter(stream, list(table[0]) if table else [], lineterminator="\n")
    writer.writeheader()
    writer.writerows(table)
    return stream.getvalue()
