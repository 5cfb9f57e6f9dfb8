"""What the replica group of a parameter-server run can do, under every backend that has such runs."""

from __future__ import annotations

from isotrain.core.contracts.capabilities import Capabilities, Capability

_HAS = frozenset(
    {
        Capability.PARAMETER_SERVER_STEP,
        Capability.SYNCHRONOUS_STEP,
        Capability.GRADIENTS,
        Capability.NAMED_STATE,
    }
)
_WITHOUT_REPLICAS = (
    Capability.LOCAL_STEP,
    Capability.APPLY_GRADIENTS,
    Capability.AVERAGE_PARAMETERS,
    Capability.SEND_RECEIVE,
    Capability.COMPUTE,
    Capability.SUBGROUPS,
    Capability.BFLOAT16_COLLECTIVES,
    Capability.UPDATE_SHARD,
    Capability.REDUCE_SCATTER_GRADIENTS,
    Capability.PIPELINE_STEP,
    Capability.UNSHARD_WEIGHTS,
    Capability.HYBRID_SHARDING,
)
PARAMETER_SERVER_CAPABILITIES = Capabilities(
    _HAS,
    dict.fromkeys(
        _WITHOUT_REPLICAS,
        "one process holds the parameters, and no replicas step or exchange by themselves",
    ),
)
