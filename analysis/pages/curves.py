"""Plots of curves: panels one below the other, on one x axis and with one legend."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from isotrain.analysis.pages.canvas import MUTED, Canvas, SeriesStyle, legend_height, shortened
from isotrain.analysis.pages.units import tick

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MAX_POINTS = 400
"""Largest number of points of a curve; more are indistinguishable on a page."""
LEFT = 58
LABEL = 26
FOOT = 52
_BETWEEN = LABEL + 22


@dataclass(frozen=True)
class Line:
    """A curve of a panel.

    Attributes:
        label: Label in the legend; lines of several panels with one label have one entry.
        xs: Positions on the x axis.
        ys: Values; those that are not finite, or not positive on a logarithmic axis, have no point.
        look: Colour, marker and dash.
        width: Width of the line in pixels.
    """

    label: str
    xs: Sequence[float]
    ys: Sequence[float]
    look: SeriesStyle
    width: float = 1.6


@dataclass(frozen=True)
class Panel:
    """Curves on one pair of axes.

    Attributes:
        title: What the y axis has, written above it.
        lines: Curves; later ones are drawn over earlier ones.
        logarithmic: Whether the y axis is logarithmic.
        from_zero: Whether the y axis begins at 0.
        empty: Text in place of the curves if no line has a point.
    """

    title: str
    lines: Sequence[Line]
    logarithmic: bool = False
    from_zero: bool = False
    empty: str = ""


def stride(points: int) -> int:
    """The stride at which the points of a curve are drawn."""
    return max(1, -(-points // MAX_POINTS))


def draw(panels: Sequence[Panel], x_label: str, width: int) -> Canvas:
    """Draws the panels from top to bottom, the first one higher than the others."""
    from matplotlib.ticker import MaxNLocator

    labels = list(dict.fromkeys(line.label for panel in panels for line in panel.lines))
    upper, lower = (210, 150) if width < 500 else (260, 170)
    heights = [upper] + [lower] * (len(panels) - 1)
    foot = legend_height(labels, width) if len(labels) > 1 else 0
    body = LABEL + sum(heights) + _BETWEEN * (len(panels) - 1)
    canvas = Canvas(width, body + FOOT + foot)
    top, drawn, handles = LABEL, list[Any](), dict[str, Any]()
    for panel, height in zip(panels, heights, strict=True):
        canvas.text(0, top - 17, shortened(panel.title, int(width / 7)), color=MUTED)
        axes = canvas.axes(LEFT, top, width - LEFT - 14, height)
        for label, handle in _draw_panel(axes, panel).items():
            handles.setdefault(label, handle)
        drawn.append(axes)
        top += height + _BETWEEN
    limits = [axes.get_xlim() for axes in drawn if axes.lines] or [(0.0, 1.0)]
    for axes in drawn:
        axes.set_xlim(min(low for low, _ in limits), max(high for _, high in limits))
        axes.xaxis.set_major_locator(MaxNLocator(nbins=9, integer=True))
    drawn[-1].set_xlabel(x_label, labelpad=6)
    if len(labels) > 1:
        canvas.legend(canvas.height - foot, handles.values(), list(handles))
    return canvas


def _draw_panel(axes: Axes, panel: Panel) -> dict[str, Any]:
    """Draws the lines of a panel; returns the handle of each by its label."""
    handles = {}
    for line in panel.lines:
        ys = [y if _has_point(y, panel) else math.nan for y in line.ys]
        (handles[line.label],) = axes.plot(line.xs, ys, **_thin(line))
    if not any(_has_point(y, panel) for line in panel.lines for y in line.ys):
        axes.set_yticks([0])
        axes.set_ylim(-1, 1)
        axes.text(0.5, 0.6, panel.empty, ha="center", color=MUTED, transform=axes.transAxes)
    elif panel.logarithmic:
        _set_logarithmic(axes)
    elif panel.from_zero:
        axes.set_ylim(bottom=0)
    return handles


def _has_point(value: float, panel: Panel) -> bool:
    return math.isfinite(value) and (value > 0 or not panel.logarithmic)


def _set_logarithmic(axes: Axes) -> None:
    from matplotlib.ticker import LogLocator, NullLocator

    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(numticks=6))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(tick)


def _thin(line: Line) -> dict[str, Any]:
    """Keywords for a line of many points, with a mark on a few of them."""
    return {
        "color": line.look.color,
        "linestyle": line.look.dash,
        "linewidth": line.width,
        "marker": line.look.marker,
        "markersize": 4.5,
        "markeredgewidth": 0,
        "markevery": max(1, len(line.ys) // 12),
    }
