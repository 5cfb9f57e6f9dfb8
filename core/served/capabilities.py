"""What the replica group of a served run can do, under every backend that has such runs."""

from __future__ import annotations

from isotrain.core.contracts.capabilities import Capabilities, Capability

_HAS = frozenset(
    {
        Capability.SERVED_STEP,
        Capability.SYNCHRONISED_STEP,
        Capability.GRADIENTS,
        Capability.NAMED_STATE,
    }
)
_WITHOUT_REPLICAS = (
    Capability.LOCAL_STEP,
    Capability.APPLY,
    Capability.AVERAGE_PARAMETERS,
    Capability.SEND_RECEIVE,
    Capability.COMPUTE,
    Capability.SUBGROUPS,
    Capability.BFLOAT16_EXCHANGE,
    Capability.PARTIAL_UPDATE,
    Capability.GRADIENTS_IN_BUCKETS,
    Capability.STAGED_STEP,
    Capability.GATHER_WEIGHTS,
    Capability.WEIGHTS_IN_HOSTS,
)
SERVED_GROUP = Capabilities(
    _HAS,
    dict.fromkeys(
        _WITHOUT_REPLICAS,
        "one process holds the parameters, and no replicas step or exchange by themselves",
    ),
)
