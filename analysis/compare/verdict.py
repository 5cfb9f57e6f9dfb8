"""The verdict of a comparison: the fastest cell, or a tie."""

from __future__ import annotations

from collections.abc import Sequence

from isotrain.analysis.compare.records import MIN_RUNS, Cell, Estimate, Verdict
from isotrain.analysis.pages.units import power
from isotrain.core.quantities import counted

_BUSY = 0.1
"""Share of the cores that others may keep busy without a warning."""
LOSS_TOLERANCE = 1e-3
"""Relative difference of losses above which the verdict warns."""


def decide(cells: Sequence[Cell]) -> Verdict:
    """Picks the cell with the highest throughput, if no other cell's interval overlaps its own."""
    ranked = sorted(_finished(cells), key=lambda cell: -_rate(cell).value)
    if not ranked:
        return Verdict(None, [], "No cell finished: there is nothing to compare.")
    first, others = ranked[0], ranked[1:]
    tied = [cell for cell in others if not _can_tell(first, cell)]
    if tied:
        return Verdict(None, [cell.name for cell in (first, *tied)], _no_telling(first, tied))
    return Verdict(first.name, [], _why(first, others) + _warning(first))


def likeness(cells: Sequence[Cell]) -> str | None:
    """Largest difference of the losses of all finished cells, in words; None with less than two."""
    finished = [c.loss_difference for c in _finished(cells) if c.loss_difference is not None]
    if len(finished) < 2:
        return None
    largest = max(finished)
    if largest == 0:
        return "all losses are equal to the last digit"
    if largest > LOSS_TOLERANCE:
        return f"losses differ by up to {largest:.1%}"
    return f"all losses are alike to {power(largest)}"


def load_warning(cells: Sequence[Cell], cores: object) -> str | None:
    """A warning if other programs kept more than `_BUSY` of the machine's cores busy; else None."""
    loads = [run.others_cores for cell in cells for run in cell.repeats if run.others_cores]
    if not isinstance(cores, int) or not any(load > _BUSY * cores for load in loads):
        return None
    busy = sum(load > _BUSY * cores for load in loads)
    return (
        f"Other programs kept up to {max(loads):.1f} of {cores} cores busy just before {busy} of"
        f" {counted(sum(len(cell.repeats) for cell in cells), 'run')}. Close them, and compare again."
    )


def _finished(cells: Sequence[Cell]) -> list[Cell]:
    return [cell for cell in cells if cell.samples_per_s is not None]


def _rate(cell: Cell) -> Estimate:
    assert cell.samples_per_s is not None
    return cell.samples_per_s


def _can_tell(fast: Cell, slow: Cell) -> bool:
    """Whether two cells differ: disjoint intervals, each from at least `MIN_RUNS` runs."""
    runs = min(len(fast.repeats), len(slow.repeats))
    return runs >= MIN_RUNS and not _rate(fast).overlaps(_rate(slow))


def _figure(cell: Cell) -> str:
    rate = _rate(cell)
    value, low, high = map(three_digits, (rate.value, rate.low, rate.high))
    return f"{cell.name} with {value} samples/s [{low}, {high}]"


def three_digits(value: float) -> str:
    """A number with three significant digits, or as an integer from 100 on."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _no_telling(first: Cell, tied: Sequence[Cell]) -> str:
    if min(len(cell.repeats) for cell in (first, *tied)) < MIN_RUNS:
        return (
            f"Cannot tell which is fastest with less than {MIN_RUNS} runs of each. So far"
            f" {_figure(first)} is ahead of {_figure(tied[0])}."
        )
    listed = "; ".join(_figure(cell) for cell in (first, *tied))
    return (
        f"Cannot tell which is fastest, their intervals overlap: {listed}. More runs (--repeats,"
        " --time-budget) may tell them apart."
    )


def _why(first: Cell, others: Sequence[Cell]) -> str:
    if not others:
        return f"Only {_figure(first)} finished."
    ratio = _rate(first).value / _rate(others[0]).value
    return (
        f"Fastest is {_figure(first)}: {ratio:.2f} times {_figure(others[0])}, the next, and their"
        " intervals do not overlap."
    )


def _warning(cell: Cell) -> str:
    if cell.loss_difference is None or cell.loss_difference <= LOSS_TOLERANCE:
        return ""
    return (
        f" But its losses differ from the reference's by up to {cell.loss_difference:.1%}:"
        " `isotrain parity` finds out where that begins."
    )
