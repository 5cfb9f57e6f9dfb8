"""The report as a self-contained HTML page: no network, no scripts, no fonts; its plots also as files."""

from __future__ import annotations

import datetime
import functools
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from isotrain.analysis.compare.plots.canvas import NARROW, WIDE, missing, png, svg_file, svg_inline
from isotrain.analysis.compare.plots.registry import Plot, plots_of
from isotrain.analysis.compare.plots.series import finished
from isotrain.analysis.compare.records import MIN_RUNS, Cell, ComparisonRecord
from isotrain.analysis.compare.report import tables as report_tables
from isotrain.analysis.compare.settings import launcher_line
from isotrain.core.errors import IsotrainError
from isotrain.core.reporting import tables
from isotrain.core.system.files import atomic_write

REPORT_FILE = "report.html"
PLOTS_FOLDER = "plots"
_HERE = Path(__file__).parent
_TEMPLATE = "report.html.jinja"
_STYLE_SHEET = "report.css"
_STATUS = {"failed": "failed", "skipped": "not measured"}


@dataclass(frozen=True)
class _Drawn:
    """A plot with its wide and narrow drawing as trusted SVG markup."""

    plot: Plot
    wide: Any
    narrow: Any


def render(comparison: ComparisonRecord, plots: Sequence[Plot] | None = None) -> str:
    """Renders the HTML page; makes the plots unless they are passed.

    Raises:
        IsotrainError: A package that the report needs is not installed.
    """
    try:
        from markupsafe import Markup

        template = page_template()
    except ImportError as error:
        raise missing(error) from None
    drawn = [
        _Drawn(
            plot,
            Markup(_inline(plot, "wide", WIDE)),
            Markup(_inline(plot, "narrow", NARROW)),
        )
        for plot in (plots_of(comparison) if plots is None else plots)
    ]
    style = Markup((_HERE / _STYLE_SHEET).read_text(encoding="utf-8"))
    page: str = template.render(style=style, plots=drawn, **_facts(comparison))
    return page


@functools.cache
def page_template() -> Any:
    """The compiled Jinja template, cached because compiling takes as long as rendering."""
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_HERE),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template(_TEMPLATE)


def _inline(plot: Plot, variant: str, width: int) -> str:
    if plot.draw is None:
        return ""
    return svg_inline(plot.draw, f"{plot.name}-{variant}", width, plot.title, plot.summary)


def _facts(comparison: ComparisonRecord) -> dict[str, Any]:
    """The template's variables besides the plots."""
    cells = finished(comparison.cells)
    groups = report_tables.groups(cells)
    return {
        "comparison": comparison,
        "created": _moment(comparison.created),
        "machine_line": _machine_line(comparison),
        "heading": _heading(comparison),
        "counts": _counts(comparison),
        "marks": _marks(comparison),
        "ties": _ties(comparison),
        "status": _STATUS,
        "groups": groups,
        "machine": report_tables.facts(comparison.machine),
        "versions": report_tables.versions(comparison.cells),
        "settings": report_tables.facts(comparison.settings),
        "spec": json.dumps(comparison.spec, indent=2, ensure_ascii=False, default=str),
        "plans": [_plan(cell, comparison) for cell in comparison.cells if cell.plan],
        "repeats": _repeats(cells),
    }


def _moment(seconds: float) -> str:
    if not math.isfinite(seconds):
        return "at an unknown time"
    moment = datetime.datetime.fromtimestamp(seconds, datetime.UTC)
    return f"{moment.day} {moment:%B %Y, %H:%M} UTC"


def _machine_line(comparison: ComparisonRecord) -> str:
    """The machine, and the launcher of runs on other hosts, in one line."""
    machine = comparison.machine
    parts = [str(machine[name]) for name in ("processor",) if machine.get(name)]
    for name, unit in (("cores", "cores"), ("memory_gib", "GiB of memory"), ("gpus", "GPUs")):
        if machine.get(name):
            parts.append(f"{tables.text_of(machine[name])} {unit}")
    line = ", ".join(parts) or "machine not recorded"
    started = launcher_line(comparison.settings)
    return f"{line}; runs were {started}" if started else line


def _heading(comparison: ComparisonRecord) -> str:
    verdict = comparison.verdict
    if verdict.pick is not None:
        alone = len(finished(comparison.cells)) == 1
        return f"{'Only one finished' if alone else 'Fastest'}: {verdict.pick}"
    if ties := _ties(comparison):
        return f"A tie of {len(ties)}: {', '.join(ties)}"
    if verdict.tied:
        return "Too few runs to tell which is fastest"
    return "No verdict" if finished(comparison.cells) else "No cell has finished"


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
    parts.append(f"{runs} run{'' if runs == 1 else 's'}")
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
            report_tables.label(name),
            report_tables.shown(name, theirs),
            report_tables.shown(name, ours),
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
        "fields": report_tables.facts(cell.plan),
        "python": cell.python,
    }


def write_report(comparison: ComparisonRecord, folder: Path) -> Path:
    """Writes `report.html`, and every plot as `plots/NAME.svg` and `plots/NAME.png`.

    Files are written atomically. A plot without data has no files.

    Returns:
        The path of the page.

    Raises:
        IsotrainError: A package that the report needs is not installed, or a file cannot be written.
    """
    plots = plots_of(comparison)
    html = render(comparison, plots).encode(errors="replace")
    target = folder / REPORT_FILE
    try:
        (folder / PLOTS_FOLDER).mkdir(parents=True, exist_ok=True)
        for plot in plots:
            _write_plot(plot, folder / PLOTS_FOLDER)
        atomic_write(target, html)
    except OSError as error:
        raise IsotrainError(f"the report cannot be written to {folder}: {error}.") from error
    return target


def _write_plot(plot: Plot, folder: Path) -> None:
    paths = folder / f"{plot.name}.svg", folder / f"{plot.name}.png"
    if plot.draw is None:
        for path in paths:
            path.unlink(missing_ok=True)  # left by an earlier report
        return
    atomic_write(paths[0], svg_file(plot.draw, plot.title, plot.summary).encode())
    atomic_write(paths[1], png(plot.draw))
