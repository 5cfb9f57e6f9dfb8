"""The result of a learning-rate search, and its plot: the losses over the rates."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from isotrain.analysis.pages import canvas
from isotrain.analysis.pages.canvas import INK, MUTED, SERIES_COLORS, Canvas
from isotrain.analysis.pages.units import tick

_LEFT, _LABEL, _HEIGHT, _FOOT = 58, 26, 280, 76


@dataclass(frozen=True)
class RateSearch:
    """Losses of a run whose learning rate rose exponentially from step to step.

    Attributes:
        rates: Learning rate of each step, after scaling.
        losses: Loss of each step.
        smoothed: Exponential moving mean of the losses, without the bias of its start.
        suggestion: Learning rate at which the smoothed loss falls fastest; None if it falls nowhere.
        lr: The suggestion as `optimizer.lr` of the spec, before scaling.
    """

    rates: tuple[float, ...]
    losses: tuple[float, ...]
    smoothed: tuple[float, ...]
    suggestion: float | None
    lr: float | None

    def to_dict(self) -> dict[str, Any]:
        """The search as JSON values."""
        return asdict(self)

    def plot(self, path: str | Path) -> None:
        """Writes a plot of the losses over the rates.

        Args:
            path: File to write: `.png`, or `.svg`.

        Raises:
            IsotrainError: matplotlib is not installed.
        """
        _write_plot(self, Path(path))


def _write_plot(search: RateSearch, path: Path) -> None:
    """Writes the plot as PNG, or as SVG if the file is named so."""
    draw = partial(_draw, search)
    if path.suffix == ".svg":
        text = canvas.svg_file(draw, "learning-rate search", _in_words(search))
        path.write_text(text, encoding="utf-8")
    else:
        path.write_bytes(canvas.png(draw))


def _in_words(search: RateSearch) -> str:
    if search.suggestion is None:
        return "The smoothed loss falls at no learning rate."
    return f"The smoothed loss falls fastest at learning rate {search.suggestion:.3g}."


def _draw(search: RateSearch, width: int) -> Canvas:
    drawing = Canvas(width, _LABEL + _HEIGHT + _FOOT)
    axes = drawing.axes(_LEFT, _LABEL, width - _LEFT - 14, _HEIGHT)
    drawing.text(0, 9, "loss", color=MUTED)
    finite = [loss if math.isfinite(loss) else math.nan for loss in search.losses]
    points = axes.plot(search.rates, finite, color=MUTED, linewidth=0, marker="o", markersize=2.5)
    line = axes.plot(search.rates, search.smoothed, color=SERIES_COLORS[0], linewidth=1.8)
    handles, labels = [*points, *line], ["each step", "smoothed"]
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter(tick)
    axes.set_xlabel("learning rate", labelpad=6)
    top = max((loss for loss in search.smoothed if math.isfinite(loss)), default=1.0)
    low = min((loss for loss in search.smoothed if math.isfinite(loss)), default=0.0)
    axes.set_ylim(low - 0.1 * (top - low), top + 0.1 * (top - low) or 1.0)
    if search.suggestion is not None:
        handles.append(axes.axvline(search.suggestion, color=INK, linewidth=1.2, dashes=(5, 4)))
        labels.append(f"suggestion {search.suggestion:.3g}")
    drawing.legend(_LABEL + _HEIGHT + _FOOT - 24, handles, labels)
    return drawing
