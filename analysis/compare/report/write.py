"""The HTML report of a comparison, and its plots as files."""

from __future__ import annotations

from pathlib import Path

from isotrain.analysis.compare.plots.canvas import png, svg_file
from isotrain.analysis.compare.plots.registry import Plot, plots_of
from isotrain.analysis.compare.records import ComparisonRecord
from isotrain.analysis.compare.report.html import render
from isotrain.core.errors import IsotrainError
from isotrain.core.system.files import atomic_write

REPORT_FILE = "report.html"
PLOTS_FOLDER = "plots"


def write_report(comparison: ComparisonRecord, folder: Path) -> Path:
    """Writes `report.html`, and every plot as `plots/NAME.svg` and `plots/NAME.png`.

    Files are written atomically. A plot without data has no files.

    Args:
        comparison: Comparison to report.
        folder: Output folder, created if missing.

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
