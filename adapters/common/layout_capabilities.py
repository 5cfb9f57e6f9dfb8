"""Capabilities of groups in which a process has a part of a replica; imports no framework."""

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
"""Capabilities that need all weights of a replica in one process."""
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
        "a replica has a shard of each weight",
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
    """Bytes that a replica of a fully sharded run sends per step.

    Each micro-batch all-gathers the weights twice and reduces the gradients; with hybrid sharding, hosts that
    have the same shards all-reduce these.

    Args:
        plan: Plan with the model's size.
        sums: Bytes of the gradient reduction, relative to an optimal reduce-scatter.
        times: Number of gradient reductions per step.
    """
    shards, hosts = plan.device_mesh.size(SHARD), plan.device_mesh.size(DATA)
    gathered = (2 * plan.gradient_accumulation_steps + times * sums) * (shards - 1) / shards
    reduced = times * 2 * (hosts - 1) / hosts / shards
    return (gathered + reduced) * (plan.gradient_bytes or 0)
