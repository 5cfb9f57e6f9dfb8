"""In which order the stages of a pipeline compute forward and backward passes: pure data.

`gpipe`: all forward passes, then all backward passes (Huang et al. 2019, arXiv:1811.06965). `1f1b`: after
as many forward passes as there are stages behind it, a stage takes a forward and a backward pass in turn, and
so keeps fewer activations (PipeDream-flush: Narayanan et al. 2021, arXiv:2006.09503). `interleaved`: the
same, with several chunks of the model on every stage, which makes the bubble smaller and the transfers more
(Narayanan et al. 2021, arXiv:2104.04473, section 2.2).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from isotrain.core.errors import PlanError, unknown_name

Direction = Literal["forward", "backward"]


@dataclass(frozen=True)
class Pass:
    """One micro-batch through one chunk of the model, forward or backward.

    Attributes:
        direction: Forward or backward.
        chunk: Of the model, counted from its inputs; chunk `c` of `p` stages is on stage `c % p`.
        micro_batch: Of the step, from 0.
    """

    direction: Direction
    chunk: int
    micro_batch: int


Order = list[Pass]
"""What one stage computes, one after the other."""


@dataclass(frozen=True)
class PipelineShape:
    """How much there is to order.

    Attributes:
        stages: Each on processes of its own.
        micro_batches: Of one step.
        chunks_per_stage: Into how many parts the model is cut for each stage; 1 but for `interleaved`.
    """

    stages: int
    micro_batches: int
    chunks_per_stage: int = 1

    @property
    def chunks(self) -> int:
        """Of the whole model."""
        return self.stages * self.chunks_per_stage


def gpipe(stage: int, shape: PipelineShape) -> Order:
    """All forward passes, then all backward passes."""
    micro_batches = range(shape.micro_batches)
    forward = [Pass("forward", stage, each) for each in micro_batches]
    return forward + [Pass("backward", stage, each) for each in micro_batches]


def one_forward_one_backward(stage: int, shape: PipelineShape) -> Order:
    """As few forward passes ahead as keep all stages busy, then a backward pass after each forward pass."""
    forward = [Pass("forward", stage, each) for each in range(shape.micro_batches)]
    backward = [Pass("backward", stage, each) for each in range(shape.micro_batches)]
    return _in_turn(forward, backward, ahead=shape.stages - stage - 1)


def interleaved(stage: int, shape: PipelineShape) -> Order:
    """One forward and one backward pass in turn, over the chunks of a stage in groups of micro-batches."""
    count = shape.micro_batches * shape.chunks_per_stage
    forward = [_interleaved("forward", stage, place, shape) for place in range(count)]
    backward = [_interleaved("backward", stage, place, shape) for place in range(count)]
    ahead = 2 * (shape.stages - stage - 1) + (shape.chunks_per_stage - 1) * shape.stages
    return _in_turn(forward, backward, ahead=ahead)


def _interleaved(direction: Direction, stage: int, place: int, shape: PipelineShape) -> Pass:
    """The pass at a place: as many micro-batches as stages through one chunk, then through the next."""
    group, within = divmod(place, shape.chunks)
    own, micro_batch = divmod(within, shape.stages)
    if direction == "backward":
        own = shape.chunks_per_stage - 1 - own
    return Pass(direction, own * shape.stages + stage, group * shape.stages + micro_batch)


def _in_turn(forward: Order, backward: Order, ahead: int) -> Order:
    """So many forward passes, then one forward and one backward pass in turn, then what is left."""
    ahead = min(ahead, len(forward))
    order = forward[:ahead]
    for place in range(len(forward) - ahead):
        order += [forward[ahead + place], backward[place]]
    return order + backward[len(forward) - ahead :]


SCHEDULES: dict[str, Callable[[int, PipelineShape], Order]] = {
    "gpipe": gpipe,
    "1f1b": one_forward_one_backward,
    "interleaved": interleaved,
}


def stage_orders(schedule: str, shape: PipelineShape) -> list[Order]:
    """What each stage computes, in its order.

    Raises:
        PlanError: There is no such schedule, or it does not fit.
    """
    if schedule not in SCHEDULES:
        raise PlanError(f"pipeline: {unknown_name('schedule', schedule, SCHEDULES)}")
    if schedule != "interleaved" and shape.chunks_per_stage > 1:
        raise PlanError(
            f"pipeline: {shape.chunks_per_stage} chunks on each stage; schedule {schedule!r} has one."
            " Take schedule=interleaved."
        )
    if schedule == "interleaved" and shape.micro_batches % shape.stages:
        raise PlanError(
            f"pipeline: {shape.micro_batches} micro-batches for {shape.stages} stages; schedule 'interleaved'"
            " passes on as many at a time as there are stages. Take a multiple of these."
        )
    return [SCHEDULES[schedule](stage, shape) for stage in range(shape.stages)]


def pipeline_bubble(shape: PipelineShape) -> float:
    """The part of a step in which a stage waits, where all passes of a direction take equally long.

    (p - 1) / (m + p - 1) with p stages and m micro-batches (arXiv:1811.06965); with v chunks on each stage
    (p - 1) / (v m + p - 1) (arXiv:2104.04473).
    """
    waiting = shape.stages - 1
    return waiting / (shape.chunks_per_stage * shape.micro_batches + waiting)
