"""Plots with one row per cell: marks with intervals, and distributions of times."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from isotrain.analysis.compare.records import Estimate
from isotrain.analysis.pages.canvas import (
    BAND,
    INK,
    PAPER,
    Canvas,
    SeriesStyle,
    legend_height,
    shortened,
)
from isotrain.analysis.pages.units import Unit

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_MAX_DOTS = 60
"""Largest number of dots of a cell, which limits the file size."""
_LOG_RANGE = 30.0
"""Ratio of largest to smallest value from which the axis is logarithmic."""
_AXIS = 46


@dataclass(frozen=True)
class Row:
    """A row of the plot: one cell.

    Attributes:
        label: Cell name.
        look: Colour and marker.
        text: Text at the right.
        marks: Estimates, each with whether its mark is filled.
        times: Values of a distribution, in seconds; empty in plots of estimates.
    """

    label: str
    look: SeriesStyle
    text: str
    marks: tuple[tuple[Estimate, bool], ...] = ()
    times: tuple[float, ...] = ()


@dataclass(frozen=True)
class _Frame:
    """Layout at a width: labels left of the rows, or above them on a phone; in pixels."""

    left: float
    right: float
    pitch: float
    middle: float
    characters: int

    @classmethod
    def at(cls, width: int) -> _Frame:
        if width < 500:
            return cls(left=6, right=12, pitch=48, middle=27, characters=33)
        return cls(left=226, right=84, pitch=27, middle=13.5, characters=31)

    @property
    def label_height(self) -> float:
        """Distance of a row's label from the top of the row in pixels."""
        return self.middle if self.left > 100 else 12


def _open(rows: Sequence[Row], width: int, extra: float = 0) -> tuple[Canvas, Axes, _Frame]:
    """A canvas with all labels, and axes whose y is in pixels from the top."""
    frame = _Frame.at(width)
    height = frame.pitch * len(rows)
    canvas = Canvas(width, height + _AXIS + extra)
    axes = canvas.axes(frame.left, 0, width - frame.left - frame.right, height)
    axes.set_ylim(height, 0)
    axes.yaxis.set_visible(False)
    for index, row in enumerate(rows):
        y = index * frame.pitch + frame.label_height
        canvas.text(0, y, shortened(row.label, frame.characters), color=INK)
        canvas.text(width - 1, y, row.text, color=INK, ha="right")
    return canvas, axes, frame


def _scale(axes: Axes, values: Sequence[float], unit: Unit, label: str) -> None:
    """Chooses the x axis for values in `unit`: from zero, or logarithmic."""
    from matplotlib.ticker import LogLocator, MaxNLocator, NullFormatter

    finite = [value for value in values if math.isfinite(value)]
    low, high = min(finite), max(finite)
    if low > 0 and high / low > _LOG_RANGE:
        axes.set_xscale("log")
        axes.xaxis.set_major_locator(LogLocator(numticks=6))
        axes.xaxis.set_major_formatter(axes.yaxis.get_major_formatter())
        axes.xaxis.set_minor_formatter(NullFormatter())
        axes.tick_params(which="minor", length=0)
        axes.set_xlim(low * 0.8, high * 1.25)
        label += " (logarithmic)"
    else:
        axes.xaxis.set_major_locator(MaxNLocator(nbins=5, steps=[1, 2, 5, 10]))
        axes.set_xlim(min(0.0, low * 1.06), high * 1.06 if high > 0 else 1.0)
    axes.set_xlabel(label, labelpad=6)


def draw_marks(
    rows: Sequence[Row],
    unit: Unit,
    label: str,
    band: Estimate | None,
    width: int,
    *,
    legend: Sequence[tuple[SeriesStyle, bool, str]] = (),
) -> Canvas:
    """Draws estimates with their intervals, one row per cell; `band` is an interval to shade."""
    names = [name for _, _, name in legend]
    canvas, axes, frame = _open(rows, width, legend_height(names, width) if legend else 0)
    ends = [v / unit.size for row in rows for e, _ in row.marks for v in (e.value, e.low, e.high)]
    _scale(axes, ends, unit, label)
    if band is not None and math.isfinite(band.low) and math.isfinite(band.high):
        axes.axvspan(band.low / unit.size, band.high / unit.size, color=BAND, zorder=0, lw=0)
    for index, row in enumerate(rows):
        y = index * frame.pitch + frame.middle
        for estimate, filled in row.marks:
            _mark(axes, estimate, unit.size, y, row.look, filled)
    if legend:
        handles = [
            axes.plot([], [], **_dot(look, filled), linestyle="none")[0]
            for look, filled, _ in legend
        ]
        canvas.legend(canvas.height - legend_height(names, width), handles, names)
    return canvas


def _mark(
    axes: Axes, estimate: Estimate, size: float, y: float, look: SeriesStyle, filled: bool
) -> None:
    low, high = estimate.low / size, estimate.high / size
    if math.isfinite(low) and math.isfinite(high):
        axes.plot([low, high], [y, y], color=look.color, linewidth=2, solid_capstyle="butt")
        axes.plot([low, high], [y, y], color=look.color, linestyle="none", marker="|", markersize=9)
    if math.isfinite(estimate.value):
        axes.plot([estimate.value / size], [y], **_dot(look, filled), clip_on=False, zorder=3)


def _dot(look: SeriesStyle, filled: bool) -> dict[str, Any]:
    return {
        "marker": look.marker,
        "markersize": 8,
        "markerfacecolor": look.color if filled else "none",
        "markeredgecolor": PAPER if filled else look.color,
        "markeredgewidth": 1 if filled else 1.8,
    }


def quartiles(values: Sequence[float]) -> tuple[float, float, float, float, float]:
    """Minimum, first quartile, median, third quartile and maximum."""
    if len(values) == 1:
        return (values[0],) * 5
    first, middle, third = statistics.quantiles(values, n=4, method="inclusive")
    return min(values), first, middle, third, max(values)


def draw_times(rows: Sequence[Row], unit: Unit, width: int) -> Canvas:
    """Draws distributions: all values as dots, the middle half as a box, the median as a line."""
    canvas, axes, frame = _open(rows, width)
    values = [value / unit.size for row in rows for value in row.times]
    _scale(axes, values, unit, f"time of a step, {unit.name}")
    for index, row in enumerate(rows):
        y = index * frame.pitch + frame.middle
        _, first, middle, third, _ = (value / unit.size for value in quartiles(row.times))
        axes.barh(
            y, third - first, left=first, height=17, color=row.look.color, alpha=0.22, linewidth=0
        )
        dots = [value / unit.size for value in thinned(row.times)]
        heights = [y + 6 * (((7 * position) % 11) / 5 - 1) for position in range(len(dots))]
        axes.plot(
            dots,
            heights,
            linestyle="none",
            marker=row.look.marker,
            markersize=3.4,
            markerfacecolor=row.look.color,
            markeredgewidth=0,
            alpha=0.75,
        )
        axes.plot([middle, middle], [y - 10, y + 10], color=INK, linewidth=2.4)
    return canvas


def thinned(values: Sequence[float]) -> list[float]:
    """At most `_MAX_DOTS` values, evenly spaced in rank, with minimum and maximum."""
    ranked = sorted(values)
    if len(ranked) <= _MAX_DOTS:
        return ranked
    last = len(ranked) - 1
    return [ranked[round(index * last / (_MAX_DOTS - 1))] for index in range(_MAX_DOTS)]
