"""What backends declare alike of groups in which a process has a part of a replica; imports no framework."""

from __future__ import annotations

from typing import TYPE_CHECKING

from isotrain.plugin import DATA, SHARD, Capabilities, Capability

if TYPE_CHECKING:
    from isotrain.plugin import Plan

OF_WHOLE_REPLICAS = (
    Capability.LOCAL_STEP,
    Capability.GRADIENTS,
    Capability.APPLY,
    Capability.AVERAGE_PARAMETERS,
    Capability.SEND_RECEIVE,
    Capability.COMPUTE,
    Capability.SUBGROUPS,
    Capability.BFLOAT16_EXCHANGE,
    Capability.SERVED_STEP,
    Capability.PARTIAL_UPDATE,
    Capability.GRADIENTS_IN_BUCKETS,
)
"""What needs all weights of a replica in one process."""
FULLY_SHARDED_GROUP = Capabilities(
    frozenset(
        {
            Capability.SYNCHRONISED_STEP,
            Capability.NAMED_STATE,
            Capability.GATHER_WEIGHTS,
            Capability.WEIGHTS_IN_HOSTS,
        }
    ),
    dict.fromkeys(
        (*OF_WHOLE_REPLICAS, Capability.STAGED_STEP), "a replica has a part of each weight"
    ),
)
STAGED_GROUP = Capabilities(
    frozenset({Capability.STAGED_STEP, Capability.NAMED_STATE}),
    dict.fromkeys(
        (
            *OF_WHOLE_REPLICAS,
            Capability.SYNCHRONISED_STEP,
            Capability.GATHER_WEIGHTS,
            Capability.WEIGHTS_IN_HOSTS,
        ),
        "a process has one stage of a replica, which takes no step alone",
    ),
)


def fully_sharded_bytes(plan: Plan, sums: int = 1, times: int = 1) -> float:
    """What a replica of a fully sharded run sends per step.

    Micro-batches join weights twice, and gradients are summed; between hosts with the same parts, these are
    reduced.

    Args:
        plan: With the measures of the model.
        sums: How much the sum of gradients moves, to an optimal one.
        times: How often gradients are summed and reduced.
    """
    parts, hosts = plan.mesh.size(SHARD), plan.mesh.size(DATA)
    joined = (2 * plan.accumulate + times * sums) * (parts - 1) / parts
    reduced = times * 2 * (hosts - 1) / hosts / parts
    return (joined + reduced) * (plan.gradient_bytes or 0)
