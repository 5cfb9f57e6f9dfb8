"""Plots of curves: speedup over replicas, and losses over steps with their differences below."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from isotrain.analysis.compare.plots.canvas import (
    MUTED,
    Canvas,
    SeriesStyle,
    legend_height,
    shortened,
)
from isotrain.analysis.compare.plots.series import Series
from isotrain.analysis.compare.records import Cell, difference
from isotrain.analysis.compare.units import tick

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MAX_POINTS = 400
"""Largest number of points of a curve; more are indistinguishable on a page."""
_LOG_FROM = 8
"""Replicas from which both axes of a scaling curve are logarithmic."""
_LEFT = 58
_LABEL = 26
_FOOT = 52


def draw_scaling(series: Sequence[Series], width: int) -> Canvas:
    """Draws speedup over replicas against the ideal line; every cell has a finite speedup."""
    labels = ["ideal", *(one.label for one in series)]
    plot = 280 if width < 500 else 360
    foot = legend_height(labels, width)
    canvas = Canvas(width, _LABEL + plot + _FOOT + foot)
    axes = canvas.axes(_LEFT, _LABEL, width - _LEFT - 14, plot)
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


def stride(steps: int) -> int:
    """The stride at which a curve's steps are drawn."""
    return max(1, -(-steps // MAX_POINTS))


def draw_losses(
    cells: Sequence[Cell], reference: Cell | None, looks: Mapping[str, SeriesStyle], width: int
) -> Canvas:
    """Draws the loss of every cell and, where there is a reference, the differences to it below."""
    from matplotlib.ticker import MaxNLocator

    labels = [cell.name for cell in cells]
    upper, lower = (210, 150) if width < 500 else (260, 170)
    if reference is None:
        lower = 0
    between = _LABEL + 22 if lower else 0
    foot = legend_height(labels, width)
    canvas = Canvas(width, _LABEL + upper + between + lower + _FOOT + foot)
    axes = canvas.axes(_LEFT, _LABEL, width - _LEFT - 14, upper)
    canvas.text(0, 9, "loss", color=MUTED)
    handles = [
        _curve(axes, cell.losses, looks[cell.name], 4.5 - 3.2 * index / max(1, len(cells) - 1))
        for index, cell in enumerate(cells)
    ]
    bottom = axes
    if reference is not None:
        top = _LABEL + upper + between
        canvas.text(
            0,
            top - 17,
            f"difference to {shortened(reference.name, int(width / 7) - 16)}",
            color=MUTED,
        )
        bottom = canvas.axes(_LEFT, top, width - _LEFT - 14, lower)
        others = [cell for cell in cells if cell is not reference]
        apart = {cell.name: differences(cell, reference) for cell in others}
        _draw_differences(bottom, apart, looks)
        bottom.set_xlim(axes.get_xlim())
    bottom.set_xlabel("step", labelpad=6)
    for shown in (axes, bottom):
        shown.xaxis.set_major_locator(MaxNLocator(nbins=9, integer=True))
    canvas.legend(canvas.height - foot, handles, labels)
    return canvas


def _curve(axes: Axes, losses: Sequence[float], look: SeriesStyle, width: float) -> Any:
    steps = range(0, len(losses), stride(len(losses)))
    values = [losses[step] if math.isfinite(losses[step]) else math.nan for step in steps]
    (line,) = axes.plot(steps, values, **_thin(look, len(values)), linewidth=width)
    return line


def _thin(look: SeriesStyle, points: int) -> dict[str, Any]:
    """Keywords for a line of many points, with a mark on a few of them."""
    return {
        "color": look.color,
        "linestyle": look.dash,
        "marker": look.marker,
        "markersize": 4.5,
        "markeredgewidth": 0,
        "markevery": max(1, points // 12),
    }


def _draw_differences(
    axes: Axes, apart: Mapping[str, Sequence[float]], looks: Mapping[str, SeriesStyle]
) -> None:
    from matplotlib.ticker import LogLocator, NullLocator

    drawn = {name: values for name, values in apart.items() if any(map(_is_positive, values))}
    for name, values in drawn.items():
        width = stride(len(values))
        steps = range(0, len(values), width)
        parts = (values[start : start + width] for start in steps)
        shown = [max(filter(_is_positive, part), default=math.nan) for part in parts]
        axes.plot(steps, shown, **_thin(looks[name], len(shown)), linewidth=1.3)
    if drawn:
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(numticks=6))
        axes.yaxis.set_minor_locator(NullLocator())
        axes.yaxis.set_major_formatter(tick)
    else:
        axes.set_yticks([0])
        axes.set_ylim(-1, 1)
        told = "equal to the last digit at every step" if apart else "no other cell to compare with"
        axes.text(0.5, 0.6, told, ha="center", color=MUTED, transform=axes.transAxes)


def _is_positive(value: float) -> bool:
    return math.isfinite(value) and value > 0


def differences(cell: Cell, reference: Cell) -> list[float]:
    """Difference of the losses at each step that both have, each relative to the larger of the two."""
    pairs = zip(reference.losses, cell.losses, strict=False)
    return [difference(theirs, ours) for theirs, ours in pairs]
