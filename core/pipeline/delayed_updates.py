"""Schedules without a flush: the last backward passes of a step are done during the next one.

The passes are those of `1f1b`, as if all steps were one. `2bw`: the gradient of a global batch updates the
weights once the next global batch has been through the forward passes, so that each is computed with the
weights before the last update, w(t + 1) = w(t) - lr gradient_t(w(t - 1)), of which a stage keeps two versions
(PipeDream-2BW: Narayanan et al. 2021, arXiv:2006.09503).
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace

from isotrain.core.errors import PlanError, unknown_name
from isotrain.core.pipeline.actions import Action, stage_actions
from isotrain.core.pipeline.schedules import (
    SCHEDULES,
    Order,
    Pass,
    PipelineShape,
    alternate,
    require_one_chunk,
    stage_orders,
    warm_up_passes,
)
from isotrain.core.quantities import counted

DELAYED_SCHEDULES = ("2bw",)
"""Names of the schedules of this module."""
_STEPS = 3
"""Simulated steps: the second one has a step before it and one after it."""


@dataclass(frozen=True)
class DelayedUpdates:
    """Actions of each process in the steps of a pipeline that is not emptied after every step.

    Micro-batches have indices in the step, from 0; the last one of the step before is -1.

    Attributes:
        fill: Actions of a step that finds the pipeline empty.
        steady: Actions of a step that finds passes of the step before in it.
        drain: Actions that empty the pipeline after a step.
        delay: Number of updates that the gradient of a global batch does not know of when it is applied.
    """

    fill: list[list[Action]]
    steady: list[list[Action]]
    drain: list[list[Action]]
    delay: int = 1


def delayed_updates(schedule: str, shape: PipelineShape) -> DelayedUpdates:
    """The actions of a schedule with delayed updates.

    Raises:
        PlanError: The schedule does not fit the shape.
    """
    by_process = _steps_of_processes(schedule, shape)
    actions = stage_actions([list(itertools.chain(*steps)) for steps in by_process])
    fill, steady, last = (
        [
            [
                replace(action, micro_batch=action.micro_batch - step * shape.micro_batches)
                for action in actions[process]
                if _own_pass(action, process) in steps[step]
            ]
            for process, steps in enumerate(by_process)
        ]
        for step in range(_STEPS)
    )
    drain = [[action for action in own if action.micro_batch < 0] for own in last]
    return DelayedUpdates(fill, steady, drain)


def step_orders(schedule: str, shape: PipelineShape) -> list[Order]:
    """The passes of each process of a replica in a step, stage by stage; each in order.

    Where updates are delayed, the step finds passes of the step before in the pipeline.

    Raises:
        PlanError: There is no such schedule, or it does not fit the shape.
    """
    if schedule in SCHEDULES:
        return stage_orders(schedule, shape)
    if schedule not in DELAYED_SCHEDULES:
        names = [*SCHEDULES, *DELAYED_SCHEDULES]
        raise PlanError(f"pipeline: {unknown_name('schedule', schedule, names)}")
    return [
        [replace(work, micro_batch=work.micro_batch - shape.micro_batches) for work in steps[1]]
        for steps in _steps_of_processes(schedule, shape)
    ]


def _own_pass(action: Action, process: int) -> Pass:
    """The pass of a process that an action is, gives the tensors to, or sends the tensors of."""
    if isinstance(action, Pass):
        return action
    is_sent = action.source == process
    back = (1 if action.direction == "forward" else -1) if is_sent else 0
    return Pass(action.direction, action.chunk - back, action.micro_batch)


def _steps_of_processes(schedule: str, shape: PipelineShape) -> list[list[Order]]:
    """Passes of each process in each simulated step, with indices that count on from step to step.

    Raises:
        PlanError: The schedule does not fit the shape.
    """
    require_one_chunk(schedule, shape)
    for stage, count in enumerate(shape.processes):
        if shape.micro_batches % count:
            raise PlanError(
                f"pipeline: schedule {schedule!r} needs a multiple of {count} micro-batches per step"
                f" (`gradient_accumulation_steps`), of which each process of stage {stage + 1} takes as many;"
                f" received {shape.micro_batches}."
            )
        needed = count * _left(stage, shape)
        if shape.micro_batches < needed:
            raise PlanError(
                f"pipeline: schedule {schedule!r} needs at least {counted(needed, 'micro-batch')} per step"
                f" (`gradient_accumulation_steps`) for these stages, received {shape.micro_batches}: at"
                " most two steps are in the pipeline."
            )
    return [
        _steps(stage, copy, shape) for stage, n in enumerate(shape.processes) for copy in range(n)
    ]


def _steps(stage: int, copy: int, shape: PipelineShape) -> list[Order]:
    """Passes of one process in each simulated step; those that are left belong to no step."""
    of_step = range(copy, shape.micro_batches, shape.processes[stage])
    micro_batches = [step * shape.micro_batches + n for step in range(_STEPS) for n in of_step]
    order = alternate(
        [Pass("forward", stage, each) for each in micro_batches],
        [Pass("backward", stage, each) for each in micro_batches],
        warm_up_passes(stage, shape),
    )
    ends = [2 * len(of_step) * (step + 1) - _left(stage, shape) for step in range(_STEPS)]
    return [order[begin:end] for begin, end in itertools.pairwise([0, *ends])]


def _left(stage: int, shape: PipelineShape) -> int:
    """Number of backward passes of a step that each process of a stage leaves for the next step.

    The last stage leaves one that it could do: no other then waits for it to learn the loss of the step.
    """
    return warm_up_passes(stage, shape) or 1
