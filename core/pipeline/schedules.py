"""Pipeline schedules: the order of forward and backward passes on each stage.

`gpipe`: all forward passes, then all backward passes (Huang et al. 2019, arXiv:1811.06965). `1f1b`: after
as many forward passes as there are later stages, a stage alternates forward and backward passes, and so
keeps fewer activations (PipeDream-flush: Narayanan et al. 2021, arXiv:2006.09503). `interleaved`: 1f1b with
several chunks of the model on every stage, which makes the bubble smaller but adds transfers (Narayanan et
al. 2021, arXiv:2104.04473, section 2.2).

A stage may have several processes, to which its micro-batches are dealt in turn (PipeDream's 1F1B-RR:
Narayanan et al. 2019, arXiv:1806.03377, section 3.2).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from isotrain.core.errors import PlanError, unknown_name
from isotrain.core.quantities import counted

Direction = Literal["forward", "backward"]


@dataclass(frozen=True)
class Pass:
    """One micro-batch through one chunk of the model, forward or backward.

    Attributes:
        direction: `forward` or `backward`.
        chunk: Index of the chunk, from the model's inputs; with `p` stages, chunk `c` is on stage `c % p`.
        micro_batch: Index of the micro-batch in the step, from 0.
    """

    direction: Direction
    chunk: int
    micro_batch: int


Order = list[Pass]
"""The passes of one process, in order."""


@dataclass(frozen=True)
class PipelineShape:
    """The numbers that determine a schedule.

    Attributes:
        stages: Number of stages, each in separate processes.
        micro_batches: Number of micro-batches per step.
        chunks_per_stage: Number of model chunks on each stage; 1 except for `interleaved`.
        stage_processes: Number of processes of each stage; empty where each stage has one.
    """

    stages: int
    micro_batches: int
    chunks_per_stage: int = 1
    stage_processes: tuple[int, ...] = ()

    @property
    def chunks(self) -> int:
        """Number of chunks of the model."""
        return self.stages * self.chunks_per_stage

    @property
    def processes(self) -> tuple[int, ...]:
        """Number of processes of each stage."""
        return self.stage_processes or (1,) * self.stages


def gpipe(stage: int, micro_batches: Sequence[int], shape: PipelineShape) -> Order:
    """All forward passes, then all backward passes."""
    forward = [Pass("forward", stage, each) for each in micro_batches]
    return forward + [Pass("backward", stage, each) for each in micro_batches]


def one_forward_one_backward(
    stage: int, micro_batches: Sequence[int], shape: PipelineShape
) -> Order:
    """A warm-up of forward passes that fills the later stages, then forward and backward alternate."""
    forward = [Pass("forward", stage, each) for each in micro_batches]
    backward = [Pass("backward", stage, each) for each in micro_batches]
    return alternate(forward, backward, warm_up_passes(stage, shape))


def warm_up_passes(stage: int, shape: PipelineShape) -> int:
    """Forward passes with which a process of a stage fills the later stages, under `1f1b`."""
    return -(-sum(shape.processes[stage:]) // shape.processes[stage]) - 1


def interleaved(stage: int, micro_batches: Sequence[int], shape: PipelineShape) -> Order:
    """1f1b over the chunks of a stage, in groups of as many micro-batches as stages."""
    count = len(micro_batches) * shape.chunks_per_stage
    forward = [_interleaved_pass("forward", stage, index, shape) for index in range(count)]
    backward = [_interleaved_pass("backward", stage, index, shape) for index in range(count)]
    warm_up = 2 * (shape.stages - stage - 1) + (shape.chunks_per_stage - 1) * shape.stages
    return alternate(forward, backward, warm_up)


def _interleaved_pass(direction: Direction, stage: int, index: int, shape: PipelineShape) -> Pass:
    """The pass with this index: a group of micro-batches through one chunk, then through the next."""
    group, index_in_group = divmod(index, shape.chunks)
    local_chunk, micro_batch = divmod(index_in_group, shape.stages)
    if direction == "backward":
        local_chunk = shape.chunks_per_stage - 1 - local_chunk
    return Pass(direction, local_chunk * shape.stages + stage, group * shape.stages + micro_batch)


def alternate(forward: Order, backward: Order, warm_up: int) -> Order:
    """`warm_up` forward passes, then forward and backward passes in turn, then the remaining ones."""
    warm_up = min(warm_up, len(forward))
    order = forward[:warm_up]
    for index in range(len(forward) - warm_up):
        order += [forward[warm_up + index], backward[index]]
    return order + backward[len(forward) - warm_up :]


SCHEDULES: dict[str, Callable[[int, Sequence[int], PipelineShape], Order]] = {
    "gpipe": gpipe,
    "1f1b": one_forward_one_backward,
    "interleaved": interleaved,
}


def stage_orders(schedule: str, shape: PipelineShape) -> list[Order]:
    """The passes of each process of a replica, stage by stage; each in order.

    Process `c` of a stage with `n` processes computes micro-batches `c`, `c + n`, `c + 2n` and so on.

    Raises:
        PlanError: There is no such schedule, or it does not fit the shape.
    """
    if schedule not in SCHEDULES:
        raise PlanError(f"pipeline: {unknown_name('schedule', schedule, SCHEDULES)}")
    if schedule != "interleaved":
        require_one_chunk(schedule, shape)
    if schedule == "interleaved" and shape.micro_batches % shape.stages:
        raise PlanError(
            f"pipeline: schedule 'interleaved' needs a multiple of {shape.stages} micro-batches (the number"
            f" of stages), received {shape.micro_batches}."
        )
    if schedule == "interleaved" and shape.stage_processes:
        raise PlanError(
            f"pipeline: schedule 'interleaved' has one process per stage, received {shape.processes}. Use"
            " schedule=1f1b."
        )
    for stage, count in enumerate(shape.processes, 1):
        if count > shape.micro_batches:
            raise PlanError(
                f"pipeline: stage {stage} has {count} processes for"
                f" {counted(shape.micro_batches, 'micro-batch')}"
                " (`gradient_accumulation_steps`); each needs one."
            )
    return [
        SCHEDULES[schedule](stage, range(copy, shape.micro_batches, count), shape)
        for stage, count in enumerate(shape.processes)
        for copy in range(count)
    ]


def require_one_chunk(schedule: str, shape: PipelineShape) -> None:
    """Refuses several chunks per stage.

    Raises:
        PlanError: There are several.
    """
    if shape.chunks_per_stage > 1:
        raise PlanError(
            f"pipeline: schedule {schedule!r} has one chunk per stage, received {shape.chunks_per_stage}. Use"
            " schedule=interleaved."
        )


def pipeline_bubble(shape: PipelineShape) -> float:
    """The fraction of a step in which a stage is idle, if all passes of a direction take equally long.

    (p - 1) / (m + p - 1) with p stages and m micro-batches (arXiv:1811.06965); with v chunks on each stage
    (p - 1) / (v m + p - 1) (arXiv:2104.04473). Each stage has one process.
    """
    idle = shape.stages - 1
    return idle / (shape.chunks_per_stage * shape.micro_batches + idle)
