"""Which run is made next."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from isotrain.analysis.compare.records import Cell


@dataclass(frozen=True)
class RunOrder:
    """How runs are ordered and when there are enough.

    Every cell is first run `repeats` times, in rounds: one run of each cell, in an order drawn anew for
    every round, so that no cell always runs first, or always after the same other one. With a time
    budget, runs are then added where the ranking is still open, until it is not or the time is over.

    Attributes:
        repeats: Runs that each cell is to have.
        seed: Of the order.
        time_budget: Seconds for all runs; None for no limit, and no further runs.
    """

    repeats: int
    seed: int
    time_budget: float | None = None

    def next_cell(
        self, cells: Sequence[Cell], open_ranking: Sequence[str], spent: float
    ) -> str | None:
        """Names the cell to run, or None when there is nothing more to do.

        Args:
            cells: With the runs they have; failed ones are left out, and so are refused ones.
            open_ranking: The cells that cannot be told from the fastest.
            spent: Seconds that all runs so far took.
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
        """The cells in the order of one round; it depends on seed, round and the cells' names."""

        def drawn(cell: Cell) -> float:
            return random.Random(f"{self.seed}/{number}/{cell.name}").random()

        return sorted(cells, key=drawn)


def _expected(cell: Cell) -> float:
    """Seconds that a cell's next run will take, as far as is known."""
    if not cell.repeats:
        return 0.0
    return sum(repeat.run_s for repeat in cell.repeats) / len(cell.repeats)
