"""Capabilities that isotrain's own backends declare under each layout; imports no framework."""

from __future__ import annotations

from typing import TYPE_CHECKING

from isotrain.plugin import (
    DATA,
    PARAMETER_SERVER_CAPABILITIES,
    SHARD,
    Capabilities,
    Capability,
    sharded_group,
)

if TYPE_CHECKING:
    from isotrain.plugin import Plan


def layout_capabilities(replicated: Capabilities) -> dict[str, Capabilities]:
    """Capabilities by parallel layout, for backends that have all layouts.

    Args:
        replicated: Capabilities of the backend's replicated groups.
    """
    fully_sharded = Capabilities.only(
        {
            Capability.SYNCHRONOUS_STEP,
            Capability.NAMED_STATE,
            Capability.UNSHARD_WEIGHTS,
            Capability.HYBRID_SHARDING,
            Capability.ORDERED_SUMS,
        },
        "a replica has a shard of each weight",
    )
    return {
        "replicated": replicated,
        "parameter-server": PARAMETER_SERVER_CAPABILITIES,
        "sharded": sharded_group(replicated),
        "fully-sharded": fully_sharded,
        "tensor": Capabilities.only(
            {Capability.SYNCHRONOUS_STEP, Capability.NAMED_STATE, Capability.UNSHARD_WEIGHTS},
            "a process has a part of the layers that are cut",
        ),
        "pipeline": Capabilities.only(
            {Capability.PIPELINE_STEP, Capability.DELAYED_UPDATES, Capability.NAMED_STATE},
            "a process has one stage of a replica, which takes no step alone",
        ),
    }


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
