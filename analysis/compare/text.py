"""A comparison as text: the tables of the command line and of notebooks."""

from __future__ import annotations

import html as markup
from pathlib import Path

from isotrain.analysis.compare.records import Cell, Change, ComparisonRecord, Estimate
from isotrain.analysis.compare.settings import launcher_line
from isotrain.analysis.compare.verdict import likeness, load_warning, three_digits
from isotrain.core.reporting.html import html_table
from isotrain.core.reporting.tables import facts, paragraph, table

_SPEED = ("cell", "samples/s", "95 % interval", "step ms", "p95 ms", "speedup", "efficiency")
_COST = (
    *("cell", "first step s", "memory MiB", "MiB/replica", "CPU ms/sample", "all-reduce ms"),
    *("loss", "difference"),
)
_CHANGE = ("cell", "throughput", "95 % interval", "first step", "memory", "loss", "slower")
_MILLI = 1e3
_NONE = "-"


def result(comparison: ComparisonRecord) -> str:
    """The whole text that `isotrain compare` prints."""
    done = [cell for cell in comparison.cells if cell.samples_per_s is not None]
    parts = []
    if done:
        parts.append(table(_SPEED, map(_speed, done)))
        parts.append(table(_COST, map(_cost, done)))
    missing = [(c.name, f"{c.status}: {c.reason}") for c in comparison.cells if c not in done]
    if missing:
        parts.append(facts("without figures", missing))
    notes: dict[str, list[str]] = {}
    for cell in done:
        for note in cell.notes:
            notes.setdefault(note, []).append(cell.name)
    parts += [paragraph(f"{', '.join(names)}: {note}.") for note, names in notes.items()]
    parts += _changes(comparison)
    if started := launcher_line(comparison.settings):
        parts.append(paragraph(f"All runs were {started}."))
    parts.append(paragraph(comparison.verdict.reason))
    if alike := likeness(comparison.cells):
        parts.append(paragraph(f"{alike[0].upper()}{alike[1:]}."))
    if warning := load_warning(comparison.cells, comparison.machine.get("cores")):
        parts.append(paragraph(warning))
    if not comparison.finished:
        parts.append(
            paragraph("This comparison is not finished: --resume with its folder goes on with it.")
        )
    return "\n".join(parts)


def result_paths(folder: Path, report: Path | None) -> str:
    """The paths of the results and the report as text."""
    missing = "not made: pip install jinja2 matplotlib, then isotrain report with this folder"
    shown = missing if report is None else str(report)
    return facts(None, [("results", str(folder)), ("report", shown)])


def _changes(comparison: ComparisonRecord) -> list[str]:
    """The changes since an earlier comparison as text blocks."""
    figures = [change for change in comparison.changes if change.samples_per_s is not None]
    others = [(c.cell, str(c.note)) for c in comparison.changes if c.samples_per_s is None]
    parts = []
    if figures:
        parts.append(paragraph("Now relative to the earlier comparison:"))
        parts.append(table(_CHANGE, map(_change, figures)))
        parts += [paragraph(f"Mind: {note}.") for note in {c.note for c in figures if c.note}]
    if others:
        parts.append(facts("no figures of both", others))
    return parts


def html(comparison: ComparisonRecord) -> str:
    """HTML for notebooks: the table of speeds and the verdict."""
    done = [cell for cell in comparison.cells if cell.samples_per_s is not None]
    rows = [_speed(cell) for cell in done]
    rows += [
        (cell.name, f"{cell.status}: {cell.reason}")
        for cell in comparison.cells
        if cell not in done
    ]
    verdict = markup.escape(comparison.verdict.reason)
    return f"{html_table(_SPEED, rows)}<p>{verdict}</p>"


def _speed(cell: Cell) -> tuple[str, ...]:
    return (
        cell.name,
        _value(cell.samples_per_s),
        _interval(cell.samples_per_s),
        _value(cell.step_s, _MILLI),
        _value(cell.step_p95_s, _MILLI),
        _value(cell.speedup),
        _NONE if cell.efficiency is None else f"{cell.efficiency.value:.0%}",
    )


def _cost(cell: Cell) -> tuple[str, ...]:
    return (
        cell.name,
        _value(cell.first_step_s),
        _value(cell.total_memory_bytes, 2**-20),
        _value(cell.memory_per_replica, 2**-20),
        _value(cell.cpu_s_per_sample, _MILLI),
        _value(cell.all_reduce_s, _MILLI),
        _NONE if cell.last_loss is None else f"{cell.last_loss:.6g}",
        _NONE if cell.loss_difference is None else f"{cell.loss_difference:.1e}",
    )


def _change(change: Change) -> tuple[str, ...]:
    return (
        change.cell,
        _value(change.samples_per_s),
        _interval(change.samples_per_s),
        _value(change.first_step_s),
        _value(change.peak_memory_bytes),
        _NONE if change.loss_difference is None else f"{change.loss_difference:.1e}",
        "SLOWER" if change.slower else "no",
    )


def _value(estimate: Estimate | None, unit: float = 1.0) -> str:
    return _NONE if estimate is None else three_digits(estimate.value * unit)


def _interval(estimate: Estimate | None) -> str:
    if estimate is None:
        return _NONE
    return f"{three_digits(estimate.low)}–{three_digits(estimate.high)}"
