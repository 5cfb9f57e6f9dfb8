"""The order of a comparison's runs: randomised rounds, then runs where the ranking is open."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from isotrain.analysis.compare.records import Cell


@dataclass(frozen=True)
class RunOrder:
    """Order of the runs of a comparison, and when to stop.

    Every cell is first run `repeats` times, in rounds: one run of each cell, in an order drawn anew for
    every round, so that no cell always runs first or always after the same one (randomised block design).
    With a time budget, runs are then added to the cells whose ranking is open, until it is decided or the
    time is used up.

    Attributes:
        repeats: Runs of each cell before any cell gets more.
        seed: Seed of the order.
        time_budget: Time budget of all runs in seconds; None: no limit, and `repeats` runs of each.
    """

    repeats: int
    seed: int
    time_budget: float | None = None

    def next_cell(
        self, cells: Sequence[Cell], open_ranking: Sequence[str], spent: float
    ) -> str | None:
        """The name of the cell to run next; None when no run is left.

        Args:
            cells: Cells that can run, with the runs made so far; failed ones are ignored.
            open_ranking: Names of the cells that cannot be told from the fastest.
            spent: Duration of all runs so far in seconds.
        """
        alive = [cell for cell in cells if cell.status != "failed"]
        for cell in self._candidates(alive, open_ranking):
            if self.time_budget is None or spent + _expected(cell) < self.time_budget:
                return cell.name
        return None

    def _candidates(self, cells: Sequence[Cell], open_ranking: Sequence[str]) -> Iterator[Cell]:
        for number in range(self.repeats):
            yield from (c for c in self.round(cells, number) if len(c.repeats) == number)
        if self.time_budget is not None:
            contenders = [cell for cell in cells if cell.name in open_ranking]
            fewest = min((len(cell.repeats) for cell in contenders), default=0)
            yield from sorted(self.round(contenders, fewest), key=lambda c: len(c.repeats))

    def round(self, cells: Sequence[Cell], number: int) -> list[Cell]:
        """The cells in the pseudorandom order of a round, which depends on seed, round and names alone."""

        def drawn(cell: Cell) -> float:
            return random.Random(f"{self.seed}/{number}/{cell.name}").random()

        return sorted(cells, key=drawn)


def _expected(cell: Cell) -> float:
    """Expected duration of a cell's next run in seconds: the mean of its runs, 0 without any."""
    if not cell.repeats:
        return 0.0
    return sum(repeat.run_s for repeat in cell.repeats) / len(cell.repeats)
