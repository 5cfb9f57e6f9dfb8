"""The tables of a report: all measures of all cells, versions, and how plans differ, as texts."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from isotrain.analysis.compare.records import Cell, Estimate
from isotrain.analysis.pages.units import Kind, Unit, unit_of

Reading = Estimate | float | None


@dataclass(frozen=True)
class TableColumn:
    """A column: its label, kind of quantity, and getter for a cell's value."""

    label: str
    kind: Kind
    of: Callable[[Cell], Reading]


@dataclass(frozen=True)
class TableEntry:
    """A cell's formatted value and interval in a column; empty if not measured."""

    value: str
    interval: str


@dataclass(frozen=True)
class TableSection:
    """A table of related measures.

    Attributes:
        title: The table's caption.
        note: Explanation of how to read it.
        heads: Label and unit of every column.
        rows: Entries of every finished cell, by its name.
    """

    title: str
    note: str
    heads: tuple[tuple[str, str], ...]
    rows: Mapping[str, tuple[TableEntry, ...]]


_SPEED = (
    TableColumn("throughput", "rate", lambda c: c.samples_per_s),
    TableColumn("step, median", "seconds", lambda c: c.step_s),
    TableColumn("step, 95th percentile", "seconds", lambda c: c.step_p95_s),
    TableColumn("speedup", "plain", lambda c: c.speedup),
    TableColumn("efficiency", "percent", lambda c: c.efficiency),
)
_COST = (
    TableColumn("first step", "seconds", lambda c: c.first_step_s),
    TableColumn("warm-up and compilation", "seconds", lambda c: c.compile_s),
    TableColumn("memory, largest process", "bytes", lambda c: c.peak_memory_bytes),
    TableColumn("memory, per replica", "bytes", lambda c: c.memory_per_replica),
    TableColumn("memory, all", "bytes", lambda c: c.total_memory_bytes),
    TableColumn("CPU time per sample", "seconds", lambda c: c.cpu_s_per_sample),
)
_EXCHANGE = (
    TableColumn("all-reduce by itself", "seconds", lambda c: c.all_reduce_s),
    TableColumn("bus bandwidth", "bytes/s", lambda c: c.bus_bandwidth),
    TableColumn("sent per replica and step", "bytes", lambda c: c.exchanged_bytes),
)


def groups(cells: Iterable[Cell]) -> list[TableSection]:
    """The tables of all measures of the finished cells, in display order."""
    cells = list(cells)
    metrics = dict.fromkeys(name for cell in cells for name in cell.metrics)
    result = (
        TableColumn("loss of the last compared step", "loss", lambda c: c.last_loss),
        *(TableColumn(name, "loss", _metric(name)) for name in metrics),
        TableColumn("loss, difference to the reference", "difference", lambda c: c.loss_difference),
    )
    return [
        _group(
            "Speed",
            "In the steady state. Speedup and efficiency are against one replica of the same backend.",
            _SPEED,
            cells,
        ),
        _group(
            "Cost",
            "First step: from the command to its end. Warm-up and compilation: what the first "
            "steps take beyond as many steady ones.",
            _COST,
            cells,
        ),
        _group(
            "Exchange",
            "All-reduce by itself: of a buffer as large as the gradient, between steps. Bus bandwidth: "
            "what every link carries meanwhile.",
            _EXCHANGE,
            cells,
        ),
        _group(
            "Result",
            "The difference is the largest over all steps, relative to the larger of the two losses.",
            result,
            cells,
        ),
    ]


def _metric(name: str) -> Callable[[Cell], Reading]:
    return lambda cell: cell.metrics.get(name)


def _group(
    title: str, note: str, measures: Iterable[TableColumn], cells: list[Cell]
) -> TableSection:
    heads, columns = [], []
    for measure in measures:
        readings = [measure.of(cell) for cell in cells]
        unit = unit_of(measure.kind, [_value(each) for each in readings if each is not None])
        heads.append((measure.label, unit.name))
        columns.append([_entry(each, unit) for each in readings])
    rows = {
        cell.name: tuple(column[index] for column in columns) for index, cell in enumerate(cells)
    }
    return TableSection(title, note, tuple(heads), rows)


def _value(measured: Estimate | float) -> float:
    return measured.value if isinstance(measured, Estimate) else measured


def _entry(measured: Reading, unit: Unit) -> TableEntry:
    if measured is None:
        return TableEntry("", "")
    if not isinstance(measured, Estimate):
        return TableEntry(unit.text(measured), "")
    if math.isnan(measured.low) or math.isnan(measured.high):
        return TableEntry(unit.text(measured.value), "")
    low, high = unit.text(measured.low), unit.text(measured.high)
    return TableEntry(unit.text(measured.value), f"{low} – {high}")


def versions(cells: Iterable[Cell]) -> list[tuple[str, str, str]]:
    """Rows of package, version, and the cells that ran with it (`all` or their names)."""
    with_any = [cell for cell in cells if cell.versions]
    by_version: dict[tuple[str, str], list[str]] = {}
    for cell in with_any:
        for pair in cell.versions.items():
            by_version.setdefault(pair, []).append(cell.name)
    return [
        (package, version, "all" if len(names) == len(with_any) else ", ".join(names))
        for (package, version), names in sorted(by_version.items())
    ]
