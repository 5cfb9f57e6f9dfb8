"""The HTML report of a comparison."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from isotrain.analysis.compare.plots.registry import plots_of
from isotrain.analysis.compare.plots.series import finished
from isotrain.analysis.compare.records import (
    COMPARISON_FILE,
    MIN_RUNS,
    Cell,
    ComparisonRecord,
)
from isotrain.analysis.compare.report import headline
from isotrain.analysis.compare.report import tables as report_tables
from isotrain.analysis.compare.settings import launcher_line
from isotrain.analysis.compare.verdict import likeness, load_warning
from isotrain.analysis.pages import page
from isotrain.analysis.pages.plot import Plot, write_plots
from isotrain.core.errors import IsotrainError
from isotrain.core.quantities import counted
from isotrain.core.system.trace_events import write_trace

_LEAST_RATE = 1e-12
_TRACE_FILE = "trace.json"
_STATUS = {"failed": "failed", "skipped": "not measured"}


def render(comparison: ComparisonRecord, plots: Sequence[Plot] | None = None) -> str:
    """Renders the HTML page; makes the plots unless they are passed.

    Raises:
        IsotrainError: A package that the report needs is not installed.
    """
    plots = plots_of(comparison) if plots is None else plots
    sections = [
        ("figures", "Figures"),
        *((plot.name, plot.title) for plot in plots),
        ("machine", "Machine and versions"),
        ("plans", "Plans"),
        ("settings", "Settings"),
        ("limits", "What the numbers cannot tell"),
    ]
    return page.render("comparison.html.jinja", plots, {"sections": sections, **_facts(comparison)})


def _facts(comparison: ComparisonRecord) -> dict[str, Any]:
    """The template's variables besides the plots."""
    cells = finished(comparison.cells)
    started = launcher_line(comparison.settings)
    machine_line = page.machine_line(comparison.machine)
    return {
        "kind": "Comparison of backends",
        "name": comparison.name,
        "source": COMPARISON_FILE,
        "comparison": comparison,
        "created": page.moment(comparison.created),
        "machine_line": f"{machine_line}; runs were {started}" if started else machine_line,
        "heading": _heading(comparison),
        "counts": _counts(comparison),
        "trained": page.without_folders(headline.trained(comparison)),
        "command": page.without_folders(headline.command(comparison)),
        "load_warning": load_warning(comparison.cells, comparison.machine.get("cores")),
        "whys": [(cell.name, headline.why(cell, comparison)) for cell in cells],
        "marks": _marks(comparison),
        "ties": _ties(comparison),
        "status": _STATUS,
        "groups": report_tables.groups(cells),
        "machine": page.facts(comparison.machine),
        "versions": report_tables.versions(comparison.cells),
        "settings": page.facts(page.without_folders(comparison.settings)),
        "spec": page.spec_text(comparison.spec),
        "plans": [_plan(cell, comparison) for cell in comparison.cells if cell.plan],
        "repeats": _repeats(cells),
    }


def _heading(comparison: ComparisonRecord) -> str:
    """The fastest cell and by how much, and how alike the losses are."""
    alike = likeness(comparison.cells)
    return f"{_fastest(comparison)}; {alike}" if alike else _fastest(comparison)


def _fastest(comparison: ComparisonRecord) -> str:
    verdict, cells = comparison.verdict, finished(comparison.cells)
    if verdict.pick is not None and len(cells) < 2:
        return f"Only one finished: {verdict.pick}"
    if verdict.pick is not None:
        rates = sorted((c.samples_per_s.value for c in cells if c.samples_per_s), reverse=True)
        return (
            f"Fastest: {verdict.pick}, {rates[0] / max(rates[1], _LEAST_RATE):.2f} times the next"
        )
    if ties := _ties(comparison):
        return f"A tie of {len(ties)}: {', '.join(ties)}"
    if verdict.tied:
        return "Too few runs to tell which is fastest"
    return "No verdict" if cells else "No cell has finished"


def _ties(comparison: ComparisonRecord) -> list[str]:
    """Names of tied cells that all have at least `MIN_RUNS` runs; else empty."""
    tied = comparison.verdict.tied
    runs = [len(comparison.cell(name).repeats) for name in tied]
    return tied if min(runs, default=0) >= MIN_RUNS else []


def _counts(comparison: ComparisonRecord) -> str:
    cells = comparison.cells
    done = len(finished(cells))
    parts = [f"{done} of {len(cells)} cells finished"]
    for status, words in (("failed", "failed"), ("skipped", "not measured")):
        count = sum(cell.status == status for cell in cells)
        if count:
            parts.append(f"{count} {words}")
    runs = sum(len(cell.repeats) for cell in cells)
    parts.append(counted(runs, "run"))
    return ", ".join(parts)


def _marks(comparison: ComparisonRecord) -> dict[str, str]:
    """Labels of the fastest or tied cells, by cell name."""
    marks = dict.fromkeys(_ties(comparison), "tie")
    if comparison.verdict.pick is not None and len(finished(comparison.cells)) > 1:
        marks[comparison.verdict.pick] = "fastest"
    return marks


def _repeats(cells: Sequence[Cell]) -> str:
    """The number of runs per cell as text."""
    numbers = sorted({len(cell.repeats) for cell in cells})
    if not numbers:
        return ""
    if len(numbers) == 1:
        return "once" if numbers[0] == 1 else f"{numbers[0]} times"
    return f"{numbers[0]} to {numbers[-1]} times"


def _plan(cell: Cell, comparison: ComparisonRecord) -> dict[str, Any]:
    """The template variables of a cell's plan and its differences to the reference's."""
    rows = [
        (
            page.label(name),
            page.shown(name, page.without_folders(theirs)),
            page.shown(name, page.without_folders(ours)),
        )
        for name, theirs, ours in cell.plan_differences
    ]
    if cell.name == comparison.reference:
        summary = "the reference"
    elif cell.status != "finished" and not rows:
        summary = _STATUS[cell.status]
    else:
        summary = f"{len(rows) or 'no'} difference{'' if len(rows) == 1 else 's'}"
    return {
        "name": cell.name,
        "summary": summary,
        "rows": rows,
        "fields": page.facts(page.without_folders(cell.plan)),
        "python": page.without_folders(cell.python),
    }


def write_report(comparison: ComparisonRecord, folder: Path) -> Path:
    """Writes `report.html`, `trace.json`, and every plot as `plots/NAME.svg` and `plots/NAME.png`.

    Files are written atomically. A plot without data has no files.

    Returns:
        The path of the page.

    Raises:
        IsotrainError: A package that the report needs is not installed, or a file cannot be written.
    """
    plots = plots_of(comparison)
    html = render(comparison, plots)
    try:
        write_plots(plots, folder)
        timelines = {cell.name: cell.timeline for cell in comparison.cells if cell.timeline}
        write_trace(timelines, folder / _TRACE_FILE)
    except OSError as error:
        raise IsotrainError(
            f"the plots and the trace cannot be written to {folder}: {error}."
        ) from error
    return page.write_page(html, folder)
