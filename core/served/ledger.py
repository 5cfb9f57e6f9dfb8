"""Who computes which slice, and when: the rules of a served run, without processes.

The bound on staleness is that of Ho et al., "More Effective Distributed ML via a Stale Synchronous Parallel
Parameter Server" (NIPS 2013), counted in global batches.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection
from dataclasses import dataclass

from isotrain.core.data.batch import Slice


@dataclass(frozen=True)
class Unit:
    """A unit of work: the slices of one replica in one step.

    Attributes:
        step: Number of the global batch in the run.
        replica: Whose share of it.
        pieces: The share's slices.
        staleness: Global batches that its weights may lag behind; None for any number.
    """

    step: int
    replica: int
    pieces: tuple[Slice, ...]
    staleness: int | None

    @property
    def share(self) -> float:
        """Of the global batch, where 1 is an equal one."""
        return sum(piece.weight for piece in self.pieces)


class Ledger:
    """Every unit from its arrival until its gradient is applied."""

    def __init__(self) -> None:
        self._waiting: list[Unit] = []
        self._open: dict[int, int] = {}

    def add(self, units: Collection[Unit]) -> None:
        """Takes over the units of one step; steps come in order."""
        self._waiting += units
        for unit in units:
            self._open[unit.step] = self._open.get(unit.step, 0) + 1

    def give_back(self, unit: Unit) -> None:
        """Takes a unit back that was not done: it comes before those of later steps."""
        self._waiting = sorted([unit, *self._waiting], key=lambda each: (each.step, each.replica))

    def applied(self, unit: Unit) -> None:
        """Notes that the unit's gradient is in the weights."""
        self._open[unit.step] -= 1
        if not self._open[unit.step]:
            del self._open[unit.step]

    @property
    def waiting(self) -> int:
        """Units that nobody computes."""
        return len(self._waiting)

    @property
    def is_empty(self) -> bool:
        """Whether everything is applied."""
        return not self._open

    def lag(self, unit: Unit) -> int:
        """By how many steps a unit that is not applied is ahead of the first such one."""
        return unit.step - min(self._open)

    def is_open(self, step: int) -> bool:
        """Whether a unit of this step is not applied yet."""
        return step in self._open

    def assign(self, free: Collection[int]) -> list[tuple[int, Unit]]:
        """Hands out what may be handed out: pairs of a free worker and its unit.

        Slices of earlier steps go first; among those of a step, one whose own worker (of the same number
        as its replica) is free goes to that one, before the others are handed to any that are left.
        """
        left, given = set(free), []
        ready = [unit for unit in self._waiting if self._may_go(unit)]
        for _, group in itertools.groupby(ready, key=lambda unit: unit.step):
            units = list(group)
            for unit in sorted(units, key=lambda unit: unit.replica not in left):
                if left:
                    worker = unit.replica if unit.replica in left else min(left)
                    left.remove(worker)
                    given.append((worker, unit))
        gone = {id(unit) for _, unit in given}
        self._waiting = [unit for unit in self._waiting if id(unit) not in gone]
        return given

    def _may_go(self, unit: Unit) -> bool:
        """Whether every unit of the steps before its bound is applied."""
        return unit.staleness is None or self.lag(unit) <= unit.staleness
