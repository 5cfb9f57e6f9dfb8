"""Schedules without a flush: the last backward passes of a step are done during the next one.

The passes are those of `1f1b`, as if all steps were one. `2bw`: the gradient of a global batch updates the
weights once the next global batch has been through the forward passes, so that each is computed with the
weights before the last update, w(t + 1) = w(t) - lr gradient_t(w(t - 1)), of which a stage keeps two versions
(PipeDream-2BW: Narayanan et al. 2021, arXiv:2006.09503).

`pipedream`: each micro-batch is a minibatch of PipeDream, whose gradient updates a stage as soon as it is
there. The backward pass has the weights of the forward pass, of which a stage keeps as many versions as it
has micro-batches under way (weight stashing; Narayanan et al. 2019, arXiv:1806.03377, section 3.3).
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, replace

from isotrain.core.errors import PlanError, unknown_name
from isotrain.core.pipeline.actions import Action, Transfer, stage_actions
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

DELAYED_SCHEDULES = ("2bw", "pipedream")
"""Names of the schedules of this module."""
_STEPS = 3
"""Simulated steps: the second one has a step before it and one after it."""


@dataclass(frozen=True)
class StageVersions:
    """Versions of a stage's weights: with which one it computes a micro-batch.

    Versions are counted by updates, from 0, and micro-batches from the first one of the run. So the version
    depends on the micro-batch alone, and not on whether the pipeline has been drained meanwhile.

    Attributes:
        update: Number of micro-batches of an update.
        together: Number of consecutive micro-batches that are computed with one version.
        lag: Number of micro-batches between the first of these and the first that the version does not know.
    """

    update: int
    together: int
    lag: int

    def version(self, micro_batch: int) -> int:
        """Version for both passes of a micro-batch; below 0 for the initial weights, as 0."""
        return (micro_batch // self.together * self.together - self.lag) // self.update

    @property
    def delay(self) -> int:
        """Largest number of updates that a gradient does not know of when it is applied."""
        indices = range(math.lcm(self.update, self.together))
        return max(index // self.update - self.version(index) for index in indices)


@dataclass(frozen=True)
class DelayedUpdates:
    """Actions of each process in the steps of a pipeline that is not emptied after every step.

    Micro-batches have indices in the step, from 0; the last one of the step before is -1.

    Attributes:
        fill: Actions of a step that finds the pipeline empty.
        steady: Actions of a step that finds passes of the step before in it.
        drain: Actions that empty the pipeline after a step.
        versions: Versions of each stage's weights.
        within_steps: Whether a stage is updated after each backward pass of its processes, instead of once in
            a step.
    """

    fill: list[list[Action]]
    steady: list[list[Action]]
    drain: list[list[Action]]
    versions: list[StageVersions]
    within_steps: bool = False


def delayed_updates(
    schedule: str, shape: PipelineShape, vertical_sync: bool = False
) -> DelayedUpdates:
    """The actions of a schedule with delayed updates.

    Args:
        schedule: Name of the schedule.
        shape: Stages and micro-batches.
        vertical_sync: Whether all stages compute a micro-batch with the version that the first one has.

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
    if schedule == "pipedream":
        fill, steady, drain = (
            [_receiving_late(actions, process) for process, actions in enumerate(step)]
            for step in (fill, steady, drain)
        )
    versions = stage_versions(schedule, shape, vertical_sync)
    return DelayedUpdates(fill, steady, drain, versions, schedule == "pipedream")


def stage_versions(
    schedule: str, shape: PipelineShape, vertical_sync: bool = False
) -> list[StageVersions]:
    """The versions of each stage's weights; the arguments are those of `delayed_updates`.

    The processes of a stage update it together, by the mean gradient of a micro-batch each.
    """
    if schedule != "pipedream":
        return [StageVersions(*[shape.micro_batches] * 3)] * shape.stages
    found = []
    for stage, count in enumerate(shape.processes):
        decides = 0 if vertical_sync else stage
        together = shape.processes[decides]
        found.append(StageVersions(count, together, together * warm_up_passes(decides, shape)))
    return found


def _receiving_late(actions: list[Action], process: int) -> list[Action]:
    """These actions with each receive just before its pass.

    The processes of a stage wait for each other after each backward pass, which the order of all transfers
    does not know of: who receives as early as that says might wait for ever.
    """
    received: dict[Pass, Transfer] = {}
    ordered: list[Action] = []
    for action in actions:
        if isinstance(action, Transfer) and action.destination == process:
            received[Pass(action.direction, action.chunk, action.micro_batch)] = action
            continue
        if isinstance(action, Pass) and action in received:
            ordered.append(received.pop(action))
        ordered.append(action)
    return ordered


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
