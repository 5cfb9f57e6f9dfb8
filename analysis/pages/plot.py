"""A plot of a page with its text alternative, and how it is written to files."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from isotrain.analysis.pages.canvas import Draw, png, svg_file
from isotrain.core.system.files import atomic_write

PLOTS_FOLDER = "plots"
_NAMED = 8
"""Largest number of series that a summary lists; of more, it lists both ends."""


@dataclass(frozen=True)
class Plot:
    """A plot and its text alternative.

    Attributes:
        name: File name without suffix.
        title: Heading.
        caption: Explanation of how to read it.
        summary: Content in words and figures; or why there is nothing to draw.
        columns: Column headings of its figures as a table.
        rows: Rows of that table.
        draw: Function that draws it at a width; None if there is nothing to draw.
    """

    name: str
    title: str
    caption: str
    summary: str
    columns: tuple[str, ...] = ()
    rows: tuple[tuple[str, ...], ...] = ()
    draw: Draw | None = None


def listed(texts: Sequence[str]) -> str:
    """All of a few texts; of many, the first three and the last."""
    if len(texts) <= _NAMED:
        return "; ".join(texts)
    return f"{'; '.join(texts[:3])}; … {len(texts) - 4} more …; {texts[-1]}"


def write_plots(plots: Sequence[Plot], folder: Path) -> None:
    """Writes every plot as `plots/NAME.svg` and `plots/NAME.png`; a plot without data has no files."""
    (folder / PLOTS_FOLDER).mkdir(parents=True, exist_ok=True)
    for plot in plots:
        svg, image = (folder / PLOTS_FOLDER / f"{plot.name}.{kind}" for kind in ("svg", "png"))
        if plot.draw is None:
            svg.unlink(missing_ok=True)  # left by an earlier report
            image.unlink(missing_ok=True)
        else:
            atomic_write(svg, svg_file(plot.draw, plot.title, plot.summary).encode())
            atomic_write(image, png(plot.draw))
