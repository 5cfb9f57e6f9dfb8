"""Grouping of cells into series, and the style of every series and cell."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from isotrain.analysis.compare.records import Cell, Estimate
from isotrain.analysis.pages.canvas import DASHES, MARKERS, SERIES_COLORS, SeriesStyle


@dataclass(frozen=True)
class Series:
    """Cells that differ only in the number of replicas.

    Attributes:
        label: Backend and collective, and the strategy where several are compared.
        cells: Cells, ascending in the number of replicas.
        look: Colour, marker and dash.
    """

    label: str
    cells: list[Cell]
    look: SeriesStyle


def finished(cells: Iterable[Cell]) -> list[Cell]:
    """The finished cells, which have estimates."""
    return [cell for cell in cells if cell.status == "finished"]


def is_finite(estimate: Estimate | None) -> bool:
    """Whether an estimate has a finite value; its interval may be infinite."""
    return estimate is not None and math.isfinite(estimate.value)


def series_of(cells: list[Cell]) -> list[Series]:
    """Groups cells by backend, collective and strategy.

    A single replica communicates nothing, so its cell belongs to every collective of its backend.
    """
    keys = list(dict.fromkeys(_key(cell, cells) for cell in cells))
    several = len({strategy for _, _, strategy in keys}) > 1
    all_series = []
    for index, key in enumerate(keys):
        members = [cell for cell in cells if _belongs(cell, key)]
        backend, collective, strategy = key
        label = backend if collective == "none" else f"{backend}:{collective}"
        all_series.append(
            Series(
                f"{label} {strategy}" if several else label,
                sorted(members, key=lambda cell: cell.replicas),
                SeriesStyle(
                    SERIES_COLORS[index % len(SERIES_COLORS)],
                    MARKERS[index % len(MARKERS)],
                    DASHES[index % len(DASHES)],
                ),
            )
        )
    return all_series


def _key(cell: Cell, cells: Iterable[Cell]) -> tuple[str, str, str]:
    collective = cell.collective
    if cell.replicas == 1:
        same = cell.backend, cell.strategy
        others = (c for c in cells if c.replicas > 1 and (c.backend, c.strategy) == same)
        collective = next((other.collective for other in others), "none")
    return cell.backend, collective, cell.strategy


def _belongs(cell: Cell, key: tuple[str, str, str]) -> bool:
    backend, collective, strategy = key
    same = (cell.backend, cell.strategy) == (backend, strategy)
    return same and (cell.replicas == 1 or cell.collective == collective)


def styles_of(cells: list[Cell]) -> dict[str, SeriesStyle]:
    """The style of each cell by name: colour and marker by series, dash by number of replicas."""
    replicas = sorted({cell.replicas for cell in cells})
    looks: dict[str, SeriesStyle] = {}
    for series in series_of(cells):
        for cell in series.cells:
            index = replicas.index(cell.replicas)
            dash = DASHES[index % len(DASHES)]
            looks.setdefault(cell.name, SeriesStyle(series.look.color, series.look.marker, dash))
    return looks
