"""A pipeline as its layers were timed: what each stage has, how long all wait, and what is better."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from isotrain.core.pipeline.actions import ScheduledPass, time_line
from isotrain.core.pipeline.partition import Partition, Partitioner
from isotrain.core.pipeline.profile import Cut, ModelProfile
from isotrain.core.pipeline.schedules import Order, Pass

_COLUMNS = 72
_WAITING = "."
_FORWARD, _BACKWARD = "0123456789", "abcdefghij"


@dataclass(frozen=True)
class PlannedStage:
    """What one stage has and does.

    Attributes:
        layers: Their names.
        forward: Seconds of the forward passes of a micro-batch.
        backward: The same, backward.
        weight_bytes: Of its trainable weights; its gradients take as much.
        slot_bytes: Of its optimizer.
        activation_bytes: What its layers give, for as many micro-batches as it keeps at once.
        sent_bytes: What it sends forward for a micro-batch.
    """

    layers: tuple[str, ...]
    forward: float
    backward: float
    weight_bytes: int
    slot_bytes: int
    activation_bytes: int
    sent_bytes: int


@dataclass(frozen=True)
class Proposal:
    """Where else to cut.

    Attributes:
        first: The names of the layers with which the stages after the first begin.
        workers: Over how many each stage is replicated.
        seconds: From one micro-batch to the next: what the slowest stage or transfer takes.
    """

    first: tuple[str, ...]
    workers: tuple[int, ...]
    seconds: float


@dataclass(frozen=True)
class PipelinePlan:
    """A pipeline, drawn.

    Attributes:
        stages: From the inputs on.
        seconds: Of a step's passes, if stages wait for nothing but what they need.
        bubble: The part of that in which a stage waits, on average.
        drawing: Of each stage when it takes which micro-batch forward (digits) and backward (letters).
        balanced: The cut into as many chunks whose slowest is fastest.
        best: What PipeDream's dynamic program finds for as many workers.
    """

    stages: tuple[PlannedStage, ...]
    seconds: float
    bubble: float
    drawing: tuple[str, ...]
    balanced: Proposal
    best: Proposal

    @property
    def crossing_bytes(self) -> float:
        """What a stage sends for a micro-batch, on average: activations, and gradients of what it gets."""
        return 2 * sum(stage.sent_bytes for stage in self.stages) / len(self.stages)


def pipeline_plan(
    profile: ModelProfile, orders: list[Order], slots: int, workers: int, bandwidth: float
) -> PipelinePlan:
    """Draws a pipeline.

    Args:
        profile: Of the model, whose layers know their chunks.
        orders: Of the passes of each stage.
        slots: How many of a weight's size the optimizer has for each.
        workers: In all.
        bandwidth: Bytes a second between them.
    """
    chunks = [profile.of_chunk(chunk) for chunk in range(profile.chunks)]

    def duration(work: Pass) -> float:
        forward = work.direction == "forward"
        return sum(layer.forward if forward else layer.backward for layer in chunks[work.chunk])

    line = time_line(orders, duration)
    seconds = max(each.end for each in line)
    busy = sum(each.end - each.begin for each in line)
    stages = [
        _stage(profile, number, len(orders), order, slots) for number, order in enumerate(orders)
    ]
    partitioner = Partitioner(profile, bandwidth)
    return PipelinePlan(
        tuple(stages),
        seconds,
        1 - busy / (seconds * len(orders)),
        tuple(_drawn(line, number, seconds) for number in range(len(orders))),
        _proposal(partitioner.balanced(len(chunks))),
        _proposal(partitioner.best(workers)),
    )


def _stage(
    profile: ModelProfile, number: int, stages: int, order: Order, slots: int
) -> PlannedStage:
    own = range(number, profile.chunks, stages)
    layers = [layer for chunk in own for layer in profile.of_chunk(chunk)]
    weights = sum(layer.weight_bytes for layer in layers)
    return PlannedStage(
        tuple(layer.name for layer in layers),
        math.fsum(layer.forward for layer in layers),
        math.fsum(layer.backward for layer in layers),
        weights,
        slots * weights,
        _kept(profile, order),
        sum(profile.crossing_bytes(_until(profile, chunk)) for chunk in own),
    )


def _kept(profile: ModelProfile, order: Order) -> int:
    """The most that a stage keeps of its forward passes for the backward passes to come."""
    sizes = [
        sum(layer.activation_bytes for layer in profile.of_chunk(chunk))
        for chunk in range(profile.chunks)
    ]
    kept = most = 0
    for work in order:
        kept += sizes[work.chunk] if work.direction == "forward" else -sizes[work.chunk]
        most = max(most, kept)
    return most


def _until(profile: ModelProfile, chunk: int) -> Cut:
    """The cut behind a chunk."""
    return sum(1 << place for place, layer in enumerate(profile.layers) if layer.chunk <= chunk)


def _drawn(line: Sequence[ScheduledPass], stage: int, seconds: float) -> str:
    cells = [_WAITING] * _COLUMNS
    for each in line:
        if each.stage == stage:
            first = int(each.begin / seconds * _COLUMNS)
            last = max(first + 1, int(each.end / seconds * _COLUMNS))
            signs = _FORWARD if each.work.direction == "forward" else _BACKWARD
            sign = signs[each.work.micro_batch % len(signs)]
            cells[first:last] = sign * len(cells[first:last])
    return "".join(cells)


def _proposal(found: Partition) -> Proposal:
    first = tuple(stage.layers[0].name for stage in found.stages[1:])
    return Proposal(first, tuple(stage.workers for stage in found.stages), found.seconds)
