"""Time lines: the activities of every process, in one or several groups."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from isotrain.analysis.pages.canvas import (
    FONT_SIZE,
    INK,
    MUTED,
    PAPER,
    Canvas,
    legend_height,
    shortened,
)
from isotrain.analysis.pages.units import Unit, tick
from isotrain.core.system.trace_events import Span

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_COLOURS = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00")
_HATCHES = ("", "////", "||||", "\\\\\\\\", "xxxx", "----")
_LANE = 15
_HEADING = 30
_GAP = 5
_FOOT = 52


def length(spans: Sequence[Span]) -> float:
    """Seconds from the start of the time line to the end of the last span."""
    return max((span.start_s + span.seconds for span in spans), default=0.0)


def seconds_by_name(spans: Sequence[Span]) -> dict[str, float]:
    """Seconds of each kind of span, averaged over the tracks."""
    tracks = {span.track for span in spans}
    total: dict[str, float] = {}
    for span in spans:
        total[span.name] = total.get(span.name, 0.0) + span.seconds
    return {name: seconds / len(tracks) for name, seconds in total.items()}


def lanes(spans: Sequence[Span]) -> list[list[Span]]:
    """Distributes spans over lanes so that spans in a lane do not overlap."""
    assigned: list[list[Span]] = []
    for span in sorted(spans, key=lambda span: (span.start_s, -span.seconds)):
        slack = 1e-6 * span.seconds
        for lane in assigned:
            if lane[-1].start_s + lane[-1].seconds <= span.start_s + slack:
                lane.append(span)
                break
        else:
            assigned.append([span])
    return assigned


def _tracks(spans: Sequence[Span]) -> dict[str, list[list[Span]]]:
    names = dict.fromkeys(span.track for span in spans)
    return {name: lanes([s for s in spans if s.track == name]) for name in names}


def _height(spans: Sequence[Span]) -> float:
    return _HEADING + sum(len(track) * _LANE + _GAP for track in _tracks(spans).values())


def draw(groups: Mapping[str, Sequence[Span]], unit: Unit, start: str, width: int) -> Canvas:
    """Draws groups of spans on one axis of time, one row for each track.

    Args:
        groups: Spans by the heading of their group.
        unit: Unit of time.
        start: What is at time 0, as in `the start of the step`.
        width: Width in pixels.
    """
    names = list(dict.fromkeys(span.name for spans in groups.values() for span in spans))
    body, foot = sum(map(_height, groups.values())), legend_height(names, width)
    left = 62 if width < 500 else 96
    canvas = Canvas(width, body + _FOOT + foot)
    axes = canvas.axes(left, 0, width - left - 12, body)
    axes.set_ylim(body, 0)
    axes.yaxis.set_visible(False)
    axes.xaxis.set_major_formatter(tick)
    axes.set_xlim(0, max(map(length, groups.values())) / unit.size * 1.01 or 1.0)
    axes.set_xlabel(f"{unit.name} after {start}", labelpad=6)
    looks = {name: index % len(_COLOURS) for index, name in enumerate(names)}
    top = 0.0
    for name, spans in groups.items():
        heading = shortened(name, int(width / 7.6))
        paper = {"facecolor": PAPER, "edgecolor": "none", "pad": 0}
        canvas.text(0, top + 18, heading, color=INK, fontweight="bold", bbox=paper)
        _draw_group(canvas, axes, spans, top + _HEADING, unit, looks)
        top += _height(spans)
    handles = [
        axes.bar(0, 0, 0, color=_COLOURS[index], hatch=_HATCHES[index], edgecolor=PAPER)
        for index in looks.values()
    ]
    canvas.legend(canvas.height - foot, handles, names)
    return canvas


def _draw_group(
    canvas: Canvas,
    axes: Axes,
    spans: Sequence[Span],
    top: float,
    unit: Unit,
    looks: Mapping[str, int],
) -> None:
    for name, track in _tracks(spans).items():
        label = shortened(name, 8 if canvas.width < 500 else 13)
        canvas.text(0, top + len(track) * _LANE / 2, label, color=MUTED, fontsize=FONT_SIZE - 1)
        for lane in track:
            for span in lane:
                index = looks[span.name]
                axes.barh(
                    top + _LANE / 2,
                    span.seconds / unit.size,
                    left=span.start_s / unit.size,
                    height=_LANE - 2,
                    color=_COLOURS[index],
                    hatch=_HATCHES[index],
                    edgecolor=PAPER,
                    linewidth=0.8,
                )
            top += _LANE
        top += _GAP
