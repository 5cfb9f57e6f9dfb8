"""Plots of curves: speedup over replicas, and losses over steps with their differences below."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from isotrain.analysis.compare.plots.series import Series
from isotrain.analysis.compare.records import Cell, difference
from isotrain.analysis.pages import curves
from isotrain.analysis.pages.canvas import MUTED, Canvas, SeriesStyle, legend_height
from isotrain.analysis.pages.curves import FOOT, LABEL, LEFT, Line, Panel
from isotrain.analysis.pages.units import tick

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_LOG_FROM = 8
"""Replicas from which both axes of a scaling curve are logarithmic."""


def draw_scaling(series: Sequence[Series], width: int) -> Canvas:
    """Draws speedup over replicas against the ideal line; every cell has a finite speedup."""
    labels = ["ideal", *(one.label for one in series)]
    plot = 280 if width < 500 else 360
    foot = legend_height(labels, width)
    canvas = Canvas(width, LABEL + plot + FOOT + foot)
    axes = canvas.axes(LEFT, LABEL, width - LEFT - 14, plot)
    canvas.text(0, 9, "speedup", color=MUTED)
    counts = sorted({1, *(cell.replicas for one in series for cell in one.cells)})
    _replicas_axis(axes, counts)
    handles = axes.plot(counts, counts, color=MUTED, linewidth=1.4, dashes=(5, 4))
    for index, one in enumerate(series):
        handles.append(_speedups(axes, one, (index - (len(series) - 1) / 2) * 0.012))
    canvas.legend(canvas.height - foot, handles, labels)
    return canvas


def _replicas_axis(axes: Axes, counts: Sequence[int]) -> None:
    from matplotlib.ticker import FixedLocator, NullLocator

    powers = [2.0**k for k in range(-6, 14)]
    if counts[-1] >= _LOG_FROM:
        axes.set_xscale("log", base=2)
        axes.set_yscale("log", base=2)
        axes.yaxis.set_major_locator(FixedLocator(powers))
        axes.set_xlim(0.85, counts[-1] * 1.18)
    else:
        axes.set_xlim(0.8, counts[-1] + 0.2)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_minor_locator(NullLocator())
        axis.set_major_formatter(tick)
    axes.xaxis.set_major_locator(FixedLocator(counts))
    axes.set_xlabel("replicas", labelpad=6)


def _speedups(axes: Axes, series: Series, shift: float) -> Any:
    """Draws one series, its marks a little to the side; returns a handle for the legend."""
    cells = [(cell.replicas, cell.speedup) for cell in series.cells if cell.speedup is not None]
    xs = [replicas * (1 + shift) for replicas, _ in cells]
    ys = [speedup.value for _, speedup in cells]
    for x, (_, speedup) in zip(xs, cells, strict=True):
        if math.isfinite(speedup.low) and math.isfinite(speedup.high):
            axes.plot([x, x], [speedup.low, speedup.high], color=series.look.color, linewidth=1.6)
    (line,) = axes.plot(xs, ys, **series.look.line(1.6))
    return line


def loss_panels(
    cells: Sequence[Cell], reference: Cell | None, looks: Mapping[str, SeriesStyle]
) -> list[Panel]:
    """The loss of every cell and, where there is a reference, the differences to it below."""
    last = max(1, len(cells) - 1)
    lines = [
        _line(cell.name, cell.losses, looks[cell.name], 8 - 6.7 * index / last)
        for index, cell in enumerate(cells)
    ]
    if reference is None:
        return [Panel("loss", lines)]
    others = [cell for cell in cells if cell is not reference]
    apart = [_largest(cell.name, differences(cell, reference), looks[cell.name]) for cell in others]
    empty = "equal to the last digit at every step" if others else "no other cell to compare with"
    return [
        Panel("loss", lines),
        Panel(f"difference to {reference.name}", apart, logarithmic=True, empty=empty),
    ]


def _line(label: str, losses: Sequence[float], look: SeriesStyle, width: float) -> Line:
    steps = range(0, len(losses), curves.stride(len(losses)))
    return Line(label, steps, [losses[step] for step in steps], look, width)


def _largest(label: str, values: Sequence[float], look: SeriesStyle) -> Line:
    """The largest of each group of values that are drawn as one point."""
    width = curves.stride(len(values))
    steps = range(0, len(values), width)
    parts = (values[start : start + width] for start in steps)
    largest = [max(filter(math.isfinite, part), default=math.nan) for part in parts]
    return Line(label, steps, largest, look, 1.3)


def differences(cell: Cell, reference: Cell) -> list[float]:
    """Difference of the losses at each step that both have, each relative to the larger of the two."""
    pairs = zip(reference.losses, cell.losses, strict=False)
    return [difference(theirs, ours) for theirs, ours in pairs]
