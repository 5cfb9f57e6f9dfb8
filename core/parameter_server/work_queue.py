"""Work queue of a parameter-server run: which worker computes which slices, and when.

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
    """A work item: the local batch of one replica in one step.

    Attributes:
        step: Number of the global batch in the run.
        replica: Replica whose local batch it is.
        slices: Micro-batches of the local batch.
        staleness: Global batches that its weights may lag behind; None: any number.
    """

    step: int
    replica: int
    slices: tuple[Slice, ...]
    staleness: int | None

    @property
    def weight(self) -> float:
        """Weight in the global mean; 1.0 for an equal part of the global batch."""
        return sum(micro_batch.weight for micro_batch in self.slices)


class WorkQueue:
    """Queue of work items; an item is open from its arrival until its gradient is applied."""

    def __init__(self) -> None:
        self._waiting: list[WorkItem] = []
        self._open: dict[int, int] = {}

    def add(self, items: Collection[WorkItem]) -> None:
        """Adds the items of one step; call it in the order of the steps."""
        self._waiting += items
        for item in items:
            self._open[item.step] = self._open.get(item.step, 0) + 1

    def requeue(self, item: WorkItem) -> None:
        """Returns an item whose worker was lost; it goes before those of later steps."""
        self._waiting = sorted([item, *self._waiting], key=lambda each: (each.step, each.replica))

    def applied(self, item: WorkItem) -> None:
        """Closes an item: its gradient is applied to the weights."""
        self._open[item.step] -= 1
        if not self._open[item.step]:
            del self._open[item.step]

    @property
    def waiting(self) -> int:
        """Number of items that no worker computes."""
        return len(self._waiting)

    @property
    def is_empty(self) -> bool:
        """Whether all items are applied."""
        return not self._open

    def lag(self, item: WorkItem) -> int:
        """Number of steps by which an open item is ahead of the earliest open step."""
        return item.step - min(self._open)

    def is_open(self, step: int) -> bool:
        """Whether a step has items that are not applied."""
        return step in self._open

    def assign(self, free: Collection[int]) -> list[tuple[int, WorkItem]]:
        """Assigns the items within their staleness bound: pairs of a free worker and its item.

        Items of earlier steps go first. Within a step, an item goes to the worker with its replica's number
        if that is free; then the other items go to any free workers.
        """
        available, assigned = set(free), []
        ready = [item for item in self._waiting if self._is_ready(item)]
        for _, group in itertools.groupby(ready, key=lambda item: item.step):
            items = list(group)
            for item in sorted(items, key=lambda item: item.replica not in available):
                if available:
                    worker = item.replica if item.replica in available else min(available)
                    available.remove(worker)
                    assigned.append((worker, item))
        assigned_ids = {id(item) for _, item in assigned}
        self._waiting = [item for item in self._waiting if id(item) not in assigned_ids]
        return assigned

    def _is_ready(self, item: WorkItem) -> bool:
        """Whether the item is within its staleness bound."""
        return item.staleness is None or self.lag(item) <= item.staleness
