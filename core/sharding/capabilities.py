"""What the replica groups of a sharded run can do, where they can be replicated."""

from __future__ import annotations

from isotrain.core.contracts.capabilities import Capabilities, Capability

_AS_REPLICATED = frozenset(
    {
        Capability.GRADIENTS,
        Capability.APPLY_GRADIENTS,
        Capability.NAMED_STATE,
        Capability.SEND_RECEIVE,
        Capability.COMPUTE,
        Capability.SUBGROUPS,
        Capability.BFLOAT16_COLLECTIVES,
    }
)
"""What they can where replicated groups can."""
_UPDATES_PARTS = frozenset({Capability.UPDATE_SHARD, Capability.REDUCE_SCATTER_GRADIENTS})
_UPDATES_ALL = (
    Capability.SYNCHRONOUS_STEP,
    Capability.LOCAL_STEP,
    Capability.AVERAGE_PARAMETERS,
)
"""What takes a replica that updates all weights."""


def sharded_group(replicated: Capabilities) -> Capabilities:
    """What groups can do of which each replica updates a part of the weights.

    Args:
        replicated: What the backend's replicated groups can do.
    """
    own = dict.fromkeys(_UPDATES_ALL, "each replica updates its own part of the weights alone")
    can = (replicated.has & _AS_REPLICATED) | _UPDATES_PARTS
    reasons = {**replicated.lacks, **own}
    return Capabilities(can, {name: why for name, why in reasons.items() if name not in can})
