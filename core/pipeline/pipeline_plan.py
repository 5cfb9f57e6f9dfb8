"""The plan of a pipeline from measured layers: its stages, timeline and bubble, and better partitions."""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass

from isotrain.core.pipeline.actions import ScheduledPass, idle_share, time_line
from isotrain.core.pipeline.delayed_updates import DELAYED_SCHEDULES, stage_versions, step_orders
from isotrain.core.pipeline.partition import Partition, Partitioner, exchange_seconds
from isotrain.core.pipeline.profile import Cut, ModelProfile
from isotrain.core.pipeline.schedules import Order, Pass, PipelineShape

_COLUMNS = 72
_IDLE = "."
_FORWARD, _BACKWARD = "0123456789", "abcdefghij"


@dataclass(frozen=True)
class PlannedStage:
    """Layers, times and memory of one stage.

    Attributes:
        layers: Names of the layers.
        processes: Number of processes, which compute its micro-batches in turn.
        forward: Seconds of the forward passes of a micro-batch.
        backward: Seconds of the backward passes of a micro-batch.
        weight_bytes: Bytes of its trainable weights in one version, and of the gradients of one update.
        weight_versions: Number of versions that it keeps of its weights.
        gradient_versions: Number of updates whose gradients it keeps at once.
        slot_bytes: Bytes of its optimizer state.
        activation_bytes: Bytes of its layers' outputs, for as many micro-batches as a process keeps at once.
        sent_bytes: Bytes that it sends forward per micro-batch.
    """

    layers: tuple[str, ...]
    processes: int
    forward: float
    backward: float
    weight_bytes: int
    weight_versions: int
    gradient_versions: int
    slot_bytes: int
    activation_bytes: int
    sent_bytes: int


@dataclass(frozen=True)
class Proposal:
    """Another partition of the model.

    Attributes:
        first: Names of the layers with which the stages after the first begin.
        workers: Number of workers of each stage.
        seconds: Seconds per micro-batch: those of the slowest stage or transfer.
    """

    first: tuple[str, ...]
    workers: tuple[int, ...]
    seconds: float


@dataclass(frozen=True)
class PipelinePlan:
    """A pipeline with its timeline.

    Attributes:
        stages: Stages, from the inputs to the outputs.
        seconds: Seconds of the passes of a step, without the time of transfers.
        step_seconds: Seconds of a step with loss, transfers between stages, exchange of gradients and update,
            if each process has its own cores and link.
        bubble: Fraction of that time in which a process is idle, on average.
        drawing: Timeline of each process as text: micro-batches forward (digits) and backward (letters).
        balanced: The partition into as many chunks whose slowest chunk is fastest.
        best: The partition of PipeDream's dynamic program for as many workers.
    """

    stages: tuple[PlannedStage, ...]
    seconds: float
    step_seconds: float
    bubble: float
    drawing: tuple[str, ...]
    balanced: Proposal
    best: Proposal

    @property
    def crossing_bytes(self) -> float:
        """Bytes that a process sends per micro-batch, on average: activations and their gradients."""
        return 2 * sum(stage.sent_bytes for stage in self.stages) / len(self.drawing)


def pipeline_plan(
    profile: ModelProfile,
    schedule: str,
    shape: PipelineShape,
    slots: int,
    workers: int,
    bandwidth: float,
    vertical_sync: bool = False,
) -> PipelinePlan:
    """Plans a pipeline.

    Args:
        profile: Layers of the model, with their chunks.
        schedule: Name of the schedule.
        shape: Stages and micro-batches.
        slots: Number of optimizer state tensors per weight, of the weight's size.
        workers: Number of workers in all.
        bandwidth: Bytes per second between workers, in each direction.
        vertical_sync: Whether all stages compute a micro-batch with the version that the first one has.
    """
    chunks = [profile.of_chunk(chunk) for chunk in range(profile.chunks)]

    def duration(work: Pass) -> float:
        forward = work.direction == "forward"
        return sum(layer.forward if forward else layer.backward for layer in chunks[work.chunk])

    orders = step_orders(schedule, shape)
    delays = [0] * shape.stages
    if schedule in DELAYED_SCHEDULES:
        delays = [each.delay for each in stage_versions(schedule, shape, vertical_sync)]
    timeline = time_line(orders, duration)
    seconds = max(each.end for each in timeline)
    first = itertools.accumulate(shape.processes, initial=0)
    stages = [
        _stage(profile, shape, stage, orders[index], slots, delay, 2 if schedule == "2bw" else 1)
        for (stage, delay), index in zip(enumerate(delays), first, strict=False)
    ]
    within_steps = schedule == "pipedream"
    update = None if within_steps else shape.micro_batches
    partitioner = Partitioner(profile, bandwidth, update)
    replicas = workers // sum(shape.processes)
    updates = [
        exchange_seconds(each.weight_bytes, replicas * each.processes, bandwidth)
        + math.fsum(layer.update for layers in chunks[stage :: shape.stages] for layer in layers)
        for stage, each in enumerate(stages)
    ]

    def step_duration(work: Pass) -> float:
        seconds = duration(work)
        if work.direction == "backward":
            seconds += profile.loss_seconds if work.chunk == profile.chunks - 1 else 0.0
            seconds += updates[work.chunk % shape.stages] if within_steps else 0.0
        return seconds

    def sending(work: Pass) -> float:
        after = work.chunk if work.direction == "forward" else work.chunk - 1
        is_sent = shape.stages > 1 and 0 <= after < profile.chunks - 1
        return profile.crossing_bytes(_cut_after(profile, after)) / bandwidth if is_sent else 0.0

    ends = [0.0] * shape.stages
    for each in time_line(orders, step_duration, sending):
        stage = each.work.chunk % shape.stages
        ends[stage] = max(ends[stage], each.end)
    last = [0.0] * shape.stages if within_steps else updates
    return PipelinePlan(
        tuple(stages),
        seconds,
        max(map(operator.add, ends, last)),
        idle_share(timeline, len(orders)),
        tuple(
            _drawing(timeline, number, seconds, shape.micro_batches)
            for number in range(len(orders))
        ),
        _proposal(partitioner.balanced(len(chunks))),
        _proposal(partitioner.best(workers)),
    )


def _stage(
    profile: ModelProfile,
    shape: PipelineShape,
    stage: int,
    order: Order,
    slots: int,
    delay: int,
    gradient_versions: int,
) -> PlannedStage:
    chunks = range(stage, profile.chunks, shape.stages)
    layers = [layer for chunk in chunks for layer in profile.of_chunk(chunk)]
    weights = sum(layer.weight_bytes for layer in layers)
    return PlannedStage(
        tuple(layer.name for layer in layers),
        shape.processes[stage],
        math.fsum(layer.forward for layer in layers),
        math.fsum(layer.backward for layer in layers),
        weights,
        1 + delay,
        gradient_versions,
        slots * weights,
        _peak_activation_bytes(profile, order),
        sum(profile.crossing_bytes(_cut_after(profile, chunk)) for chunk in chunks),
    )


def _peak_activation_bytes(profile: ModelProfile, order: Order) -> int:
    """The most bytes of activations that a process keeps at once for backward passes."""
    sizes = [
        sum(layer.activation_bytes for layer in profile.of_chunk(chunk))
        for chunk in range(profile.chunks)
    ]
    kept = peak = sum(sizes[work.chunk] for work in order if work.micro_batch < 0)
    for work in order:
        kept += sizes[work.chunk] if work.direction == "forward" else -sizes[work.chunk]
        peak = max(peak, kept)
    return peak


def _cut_after(profile: ModelProfile, chunk: int) -> Cut:
    """The cut after a chunk."""
    return sum(1 << index for index, layer in enumerate(profile.layers) if layer.chunk <= chunk)


def _drawing(
    timeline: Sequence[ScheduledPass], process: int, seconds: float, micro_batches: int
) -> str:
    cells = [_IDLE] * _COLUMNS
    for each in timeline:
        if each.process == process:
            first = int(each.begin / seconds * _COLUMNS)
            last = max(first + 1, int(each.end / seconds * _COLUMNS))
            signs = _FORWARD if each.work.direction == "forward" else _BACKWARD
            sign = signs[each.work.micro_batch % micro_batches % len(signs)]
            cells[first:last] = sign * len(cells[first:last])
    return "".join(cells)


def _proposal(partition: Partition) -> Proposal:
    first = tuple(stage.layers[0].name for stage in partition.stages[1:])
    return Proposal(first, tuple(stage.workers for stage in partition.stages), partition.seconds)
