"""The actions of a step, for any backend."""

from __future__ import annotations

from typing import TYPE_CHECKING

from isotrain.core.contracts.backend.group_protocols import ActionTimingGroup
from isotrain.core.pipeline.executor import ExecutedAction

if TYPE_CHECKING:
    from isotrain.core.contracts.backend.replica_group import ReplicaGroup

_UPDATE = "update"


def step_actions(group: ReplicaGroup, begin: float, end: float) -> list[ExecutedAction]:
    """Actions of the last step, to the end of its call; one `step` where they are not known. Local.

    Args:
        group: Replica group, whose action timing is enabled if it has any.
        begin: Start of the step's call by `time.perf_counter`, in seconds.
        end: End of the step's call.
    """
    executed = group.last_actions() if isinstance(group, ActionTimingGroup) else ()
    actions = [each for each in executed if each.begin >= begin]
    if not actions:
        return [ExecutedAction("step", begin, end)]
    update = actions.pop().begin if actions[-1].name == _UPDATE else actions[-1].end
    return [*actions, ExecutedAction(_UPDATE, update, end)]
