"""What stages do one after the other: passes, and between them what they send each other.

All that happens in a step has one order, and each stage does its own part of it in that order. So no stage
waits for one that waits for it, even where whoever sends waits for who receives: of all that is left to do,
what comes first in the order can be done.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from isotrain.core.pipeline.schedules import Direction, Order, Pass


@dataclass(frozen=True)
class Transfer:
    """What goes from the stage of a chunk to that of the next: activations forward, gradients backward.

    Attributes:
        direction: Forward or backward.
        chunk: Whose pass needs it.
        micro_batch: Of the step.
        source: The stage that has it.
        destination: The stage that needs it.
    """

    direction: Direction
    chunk: int
    micro_batch: int
    source: int
    destination: int

    @property
    def answered(self) -> Transfer:
        """Of gradients: the transfer of the activations that they are of."""
        ends = self.destination, self.source
        return Transfer("forward", self.chunk + 1, self.micro_batch, *ends)


Action = Pass | Transfer


@dataclass(frozen=True)
class ScheduledPass:
    """A pass, and when a stage takes it.

    Attributes:
        stage: Whose it is.
        work: The pass.
        begin: In the unit of the durations.
        end: The same.
    """

    stage: int
    work: Pass
    begin: float
    end: float


Duration = Callable[[Pass], float]


def same(work: Pass) -> float:
    """Every pass takes as long as every other."""
    return 1.0


def needed(work: Pass, chunks: int) -> Pass | None:
    """The pass of another chunk whose result a pass needs; None where it needs none."""
    if work.direction == "forward":
        return Pass("forward", work.chunk - 1, work.micro_batch) if work.chunk else None
    last = work.chunk == chunks - 1
    return None if last else Pass("backward", work.chunk + 1, work.micro_batch)


def time_line(orders: list[Order], duration: Duration = same) -> list[ScheduledPass]:
    """When each pass is taken if stages wait for nothing but what they need, by beginning.

    Args:
        orders: Of all stages.
        duration: Of a pass.

    Raises:
        ValueError: Some pass is waited for by who must take it.
    """
    chunks = len({each.chunk for order in orders for each in order})
    ends: dict[Pass, float] = {}
    free = [0.0] * len(orders)
    left = [list(reversed(order)) for order in orders]
    found: list[ScheduledPass] = []
    while any(left):
        ready = list(_ready(left, ends, free, chunks))
        if not ready:
            raise ValueError("every stage waits for another")
        begin, stage = min(ready)
        work = left[stage].pop()
        free[stage] = ends[work] = begin + duration(work)
        found.append(ScheduledPass(stage, work, begin, ends[work]))
    return sorted(found, key=lambda each: each.begin)


def _ready(
    left: list[Order], ends: dict[Pass, float], free: list[float], chunks: int
) -> Iterator[tuple[float, int]]:
    """When, and of which stage, the next passes that need nothing more can be taken."""
    for stage, order in enumerate(left):
        if order:
            before = needed(order[-1], chunks)
            if before is None or before in ends:
                yield max(free[stage], ends.get(before, 0.0) if before else 0.0), stage


def stage_actions(orders: list[Order]) -> list[list[Action]]:
    """What each stage does, in its order: passes, and as soon as there is something to send, transfers."""
    chunks = len({each.chunk for order in orders for each in order})
    events: list[tuple[float, int, list[int], Action]] = []
    for timed in time_line(orders):
        events.append((timed.begin, 1, [timed.stage], timed.work))
        transfer = _sent(timed.work, len(orders), chunks)
        if transfer is not None:
            events.append((timed.end, 0, [transfer.source, transfer.destination], transfer))
    found: list[list[Action]] = [[] for _ in orders]
    for _, _, stages, action in sorted(events, key=lambda event: event[:2]):
        for stage in stages:
            found[stage].append(action)
    return found


def _sent(work: Pass, stages: int, chunks: int) -> Transfer | None:
    """What a stage sends after a pass; None where nobody else needs it."""
    chunk = work.chunk + (1 if work.direction == "forward" else -1)
    source, destination = work.chunk % stages, chunk % stages
    if not 0 <= chunk < chunks or source == destination:
        return None
    return Transfer(work.direction, chunk, work.micro_batch, source, destination)
