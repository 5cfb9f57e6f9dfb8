"""Runs all cells in rounds, each round in a new order, and sees that they train the same."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np

from benchmarks.peers.run import Cell, ContenderError, Measured, run
from benchmarks.peers.workloads import WORKLOADS, Workload

Results = dict[Cell, list[Measured]]
_ATTEMPTS = 3
"""A sound program may end badly now and then: torch aborts when a peer leaves first."""


def measure(
    cells: Sequence[Cell], rounds: int, seed: int, tell: Callable[[str], None]
) -> tuple[Results, Results]:
    """Runs every cell once for its memory and to fill the caches, then `rounds` times for its times.

    Args:
        cells: Cells to measure.
        rounds: Timed runs of each.
        seed: Seed of the orders.
        tell: Function that takes one line per run.

    Returns:
        The first runs, of which only memory counts; and the timed ones, in the order of the rounds.
        An interrupt ends the measurement with the rounds that are whole, if any is.

    Raises:
        ContenderError: One failed three times in a row, or its losses are not those of the others.
    """
    order = np.random.default_rng(seed)
    first = _round(cells, order, f"0/{rounds}", True, tell)
    see_that_losses_agree(_by_cell(cells, [first]))
    timed: list[dict[Cell, Measured]] = []
    try:
        for number in range(1, rounds + 1):
            timed.append(_round(cells, order, f"{number}/{rounds}", False, tell))
            see_that_losses_agree(_by_cell(cells, timed))
    except KeyboardInterrupt:
        if not timed:
            raise
        tell(f"interrupted: {len(timed)} of {rounds} rounds are whole, and count")
    return _by_cell(cells, [first]), _by_cell(cells, timed)


def _round(
    cells: Sequence[Cell],
    order: np.random.Generator,
    label: str,
    look_at_memory: bool,
    tell: Callable[[str], None],
) -> dict[Cell, Measured]:
    """Runs every cell once, in a new order."""
    found: dict[Cell, Measured] = {}
    for cell in _in_new_order(cells, order):
        found[cell] = seen = _run(cell, look_at_memory, tell)
        tell(f"{label} {cell}: {seen.step * 1e3:.3f} ms, {seen.first_step:.2f} s")
    return found


def _in_new_order(cells: Sequence[Cell], order: np.random.Generator) -> Iterator[Cell]:
    """All cells; those of one place follow each other, for a machine changes while a round lasts."""
    places: dict[tuple[str, int, int], list[Cell]] = {}
    for cell in cells:
        places.setdefault(cell.configuration, []).append(cell)
    compared = list(places.values())
    for number in order.permutation(len(compared)):
        alike = compared[number]
        for index in order.permutation(len(alike)):
            yield alike[index]


def _by_cell(cells: Sequence[Cell], rounds: Sequence[dict[Cell, Measured]]) -> Results:
    return {cell: [found[cell] for found in rounds] for cell in cells}


def _run(cell: Cell, look_at_memory: bool, tell: Callable[[str], None]) -> Measured:
    """Runs a cell; says when it fails, and runs it again."""
    for _ in range(_ATTEMPTS - 1):
        try:
            return run(cell, look_at_memory=look_at_memory)
        except ContenderError as error:
            tell(f"again: {str(error).splitlines()[0]}")
    return run(cell, look_at_memory=look_at_memory)


def see_that_losses_agree(results: Results) -> None:
    """Compares all contenders of a workload, or also of as many replicas, with the middle one.

    Raises:
        ContenderError: Names those that trained something else.
    """
    alike: dict[tuple[str, int], Results] = {}
    for cell, runs in results.items():
        replicas = cell.replicas if WORKLOADS[cell.workload].normalises_batches else 0
        alike.setdefault((cell.workload, replicas), {})[cell] = runs
    for (workload, _), own in sorted(alike.items()):
        _see_that_they_agree(WORKLOADS[workload], own)


def _see_that_they_agree(work: Workload, results: Results) -> None:
    runs = [
        (cell, measured.losses[: work.compared])
        for cell, all_runs in results.items()
        for measured in all_runs
    ]
    middle = np.median([losses for _, losses in runs], axis=0)
    apart = [
        f"{cell}: {_text(losses)}"
        for cell, losses in runs
        if not np.allclose(losses, middle, rtol=work.tolerance, atol=0)
    ]
    if apart:
        raise ContenderError(
            f"{work.name}: expected the mean losses of all contenders to be {_text(middle)}"
            f" (each within {work.tolerance:g}), got\n" + "\n".join(apart)
        )


def _text(losses: Iterable[float]) -> str:
    return ", then ".join(f"{loss:.6f}" for loss in losses)
