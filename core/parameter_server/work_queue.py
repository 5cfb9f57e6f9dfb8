"""Who computes which slice, and when: the rules of a parameter-server run, without processes.

The bound on staleness is that of Ho et al., "More Effective Distributed ML via a Stale Synchronous Parallel
Parameter Server" (NIPS 2013), counted in global batches.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection
from dataclasses import dataclass

from isotrain.core.data.batch import Slice


@dataclass(frozen=True)
class WorkItem:
    """A unit of work: the slices of one replica in one step.

    Attributes:
        step: Number of the global batch in the run.
        replica: Whose share of it.
        slices: The share's slices.
        staleness: Global batches that its weights may lag behind; None for any number.
    """

    step: int
    replica: int
    slices: tuple[Slice, ...]
    staleness: int | None

    @property
    def share(self) -> float:
        """Of the global batch, where 1 is an equal one."""
        return sum(piece.weight for piece in self.slices)


class WorkQueue:
    """Every item from its arrival until its gradient is applied."""

    def __init__(self) -> None:
        self._waiting: list[WorkItem] = []
        self._open: dict[int, int] = {}

    def add(self, items: Collection[WorkItem]) -> None:
        """Takes over the items of one step; steps come in order."""
        self._waiting += items
        for item in items:
            self._open[item.step] = self._open.get(item.step, 0) + 1

    def requeue(self, item: WorkItem) -> None:
        """Takes an item back that was not done: it comes before those of later steps."""
        self._waiting = sorted([item, *self._waiting], key=lambda each: (each.step, each.replica))

    def applied(self, item: WorkItem) -> None:
        """Notes that the item's gradient is in the weights."""
        self._open[item.step] -= 1
        if not self._open[item.step]:
            del self._open[item.step]

    @property
    def waiting(self) -> int:
        """Units that nobody computes."""
        return len(self._waiting)

    @property
    def is_empty(self) -> bool:
        """Whether everything is applied."""
        return not self._open

    def lag(self, item: WorkItem) -> int:
        """By how many steps an item that is not applied is ahead of the first such one."""
        return item.step - min(self._open)

    def is_open(self, step: int) -> bool:
        """Whether an item of this step is not applied yet."""
        return step in self._open

    def assign(self, free: Collection[int]) -> list[tuple[int, WorkItem]]:
        """Hands out what may be handed out: pairs of a free worker and its item.

        Slices of earlier steps go first; among those of a step, one whose own worker (of the same number
        as its replica) is free goes to that one, before the others are handed to any that are left.
        """
        left, given = set(free), []
        ready = [item for item in self._waiting if self._may_go(item)]
        for _, group in itertools.groupby(ready, key=lambda item: item.step):
            items = list(group)
            for item in sorted(items, key=lambda item: item.replica not in left):
                if left:
                    worker = item.replica if item.replica in left else min(left)
                    left.remove(worker)
                    given.append((worker, item))
        gone = {id(item) for _, item in given}
        self._waiting = [item for item in self._waiting if id(item) not in gone]
        return given

    def _may_go(self, item: WorkItem) -> bool:
        """Whether every item of the steps before its bound is applied."""
        return item.staleness is None or self.lag(item) <= item.staleness
