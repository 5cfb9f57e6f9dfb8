"""What backends declare alike of groups in which a process has a part of a replica; imports no framework."""

from __future__ import annotations

from typing import TYPE_CHECKING

from isotrain.plugin import DATA, SHARD, Capabilities, Capability

if TYPE_CHECKING:
    from isotrain.plugin import Plan

REPLICATED_ONLY_CAPABILITIES = (
    Capability.LOCAL_STEP,
    Capability.GRADIENTS,
    Capability.APPLY_GRADIENTS,
    Capability.AVERAGE_PARAMETERS,
    Capability.SEND_RECEIVE,
    Capability.COMPUTE,
    Capability.SUBGROUPS,
    Capability.BFLOAT16_COLLECTIVES,
    Capability.PARAMETER_SERVER_STEP,
    Capability.UPDATE_SHARD,
    Capability.REDUCE_SCATTER_GRADIENTS,
)
"""What needs all weights of a replica in one process."""
FULLY_SHARDED_CAPABILITIES = Capabilities(
    frozenset(
        {
            Capability.SYNCHRONOUS_STEP,
            Capability.NAMED_STATE,
            Capability.UNSHARD_WEIGHTS,
            Capability.HYBRID_SHARDING,
        }
    ),
    dict.fromkeys(
        (*REPLICATED_ONLY_CAPABILITIES, Capability.PIPELINE_STEP),
        "a replica has a part of each weight",
    ),
)
PIPELINE_CAPABILITIES = Capabilities(
    frozenset({Capability.PIPELINE_STEP, Capability.NAMED_STATE}),
    dict.fromkeys(
        (
            *REPLICATED_ONLY_CAPABILITIES,
            Capability.SYNCHRONOUS_STEP,
            Capability.UNSHARD_WEIGHTS,
            Capability.HYBRID_SHARDING,
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
    parts, hosts = plan.device_mesh.size(SHARD), plan.device_mesh.size(DATA)
    joined = (2 * plan.gradient_accumulation_steps + times * sums) * (parts - 1) / parts
    reduced = times * 2 * (hosts - 1) / hosts / parts
    return (joined + reduced) * (plan.gradient_bytes or 0)
