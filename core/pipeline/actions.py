"""Actions of the processes of a pipeline in one step: passes, and transfers between stages.

All actions of a step have one global order, and each process does its own actions in that order. So there is
no deadlock, even where a send blocks until it is received: of all actions that are left, the first one in the
order can always be done. Processes are named by their index in the replica, stage by stage.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from isotrain.core.pipeline.schedules import Direction, Order, Pass


@dataclass(frozen=True)
class Transfer:
    """A send from a process of one stage to one of another: activations forward, their gradients backward.

    Attributes:
        direction: `forward` or `backward`.
        chunk: Chunk whose pass needs the tensors.
        micro_batch: Index of the micro-batch in the step, from 0.
        source: Process that sends.
        destination: Process that receives.
    """

    direction: Direction
    chunk: int
    micro_batch: int
    source: int
    destination: int

    @property
    def activation_transfer(self) -> Transfer:
        """Transfer of the activations to which this transfer's gradients belong."""
        return Transfer("forward", self.chunk + 1, self.micro_batch, self.destination, self.source)


Action = Pass | Transfer


@dataclass(frozen=True)
class ScheduledPass:
    """A pass with its time on a process.

    Attributes:
        process: Index of the process.
        work: The pass.
        begin: Start time, in the unit of the durations.
        end: End time, in the unit of the durations.
    """

    process: int
    work: Pass
    begin: float
    end: float


Duration = Callable[[Pass], float]


def same(work: Pass) -> float:
    """The duration 1 for every pass."""
    return 1.0


def needed(work: Pass, chunks: int) -> Pass | None:
    """The pass of a neighbouring chunk whose result a pass needs; None for the first forward chunk and the
    last backward one.
    """
    if work.direction == "forward":
        return Pass("forward", work.chunk - 1, work.micro_batch) if work.chunk else None
    last = work.chunk == chunks - 1
    return None if last else Pass("backward", work.chunk + 1, work.micro_batch)


def at_once(work: Pass) -> float:
    """The duration 0 for every pass."""
    return 0.0


def time_line(
    orders: list[Order], duration: Duration = same, sending: Duration = at_once
) -> list[ScheduledPass]:
    """Simulates a step: all passes with their times, sorted by start; each starts when its input is there.

    Args:
        orders: Passes of each process, in order. What passes of other steps give is there from the start.
        duration: Function from a pass to its duration.
        sending: Function from a pass to the duration for which its process sends what it gives, one after the
            other, beside its passes.

    Raises:
        ValueError: The orders deadlock.
    """
    chunks = len({each.chunk for order in orders for each in order})
    arrivals = _of_other_steps(orders, chunks)
    free_from, link_free_from = [0.0] * len(orders), [0.0] * len(orders)
    remaining = [list(reversed(order)) for order in orders]
    scheduled: list[ScheduledPass] = []
    while any(remaining):
        ready = list(_ready(remaining, arrivals, free_from, chunks))
        if not ready:
            raise ValueError("deadlock: every process waits for another")
        begin, process = min(ready)
        work = remaining[process].pop()
        end = free_from[process] = begin + duration(work)
        arrivals[work] = max(end, link_free_from[process]) + sending(work)
        link_free_from[process] = arrivals[work]
        scheduled.append(ScheduledPass(process, work, begin, end))
    return sorted(scheduled, key=lambda each: each.begin)


def _of_other_steps(orders: list[Order], chunks: int) -> dict[Pass, float]:
    """Passes that are needed and are in no order, what they give there from 0 on."""
    of_step = {each for order in orders for each in order}
    inputs = (needed(each, chunks) for each in of_step)
    return {each: 0.0 for each in inputs if each is not None and each not in of_step}


def idle_share(timeline: Sequence[ScheduledPass], processes: int) -> float:
    """The fraction of a step in which a process is idle, on average."""
    busy = sum(each.end - each.begin for each in timeline)
    return 1 - busy / max(each.end for each in timeline) / processes


def _ready(
    remaining: list[Order], arrivals: dict[Pass, float], free_from: list[float], chunks: int
) -> Iterator[tuple[float, int]]:
    """Start time and process of each next pass (the last in `remaining`) whose input is there."""
    for process, order in enumerate(remaining):
        if order:
            before = needed(order[-1], chunks)
            if before is None or before in arrivals:
                arrival = arrivals.get(before, 0.0) if before else 0.0
                yield max(free_from[process], arrival), process


def stage_actions(orders: list[Order]) -> list[list[Action]]:
    """The actions of each process, in order: its passes, and transfers as early as possible."""
    process_of = {each: process for process, order in enumerate(orders) for each in order}
    events: list[tuple[float, int, list[int], Action]] = []
    for scheduled in time_line(orders):
        events.append((scheduled.begin, 1, [scheduled.process], scheduled.work))
        transfer = _transfer_after(scheduled.work, process_of)
        if transfer is not None:
            events.append((scheduled.end, 0, [transfer.source, transfer.destination], transfer))
    actions: list[list[Action]] = [[] for _ in orders]
    for _, _, processes, action in sorted(events, key=lambda event: event[:2]):
        for process in processes:
            actions[process].append(action)
    return actions


def _transfer_after(work: Pass, process_of: Mapping[Pass, int]) -> Transfer | None:
    """The transfer of a pass's result; None where no other process needs it."""
    chunk = work.chunk + (1 if work.direction == "forward" else -1)
    source = process_of[work]
    destination = process_of.get(Pass(work.direction, chunk, work.micro_batch), source)
    if source == destination:
        return None
    return Transfer(work.direction, chunk, work.micro_batch, source, destination)
