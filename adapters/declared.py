"""What backends declare alike of groups in which a process has a part of a replica; imports no framework."""

from __future__ import annotations

from isotrain.plugin import Capabilities, Capability

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
