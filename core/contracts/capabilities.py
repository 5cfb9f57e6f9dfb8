"""What a strategy can ask of a backend, and a backend can declare."""

from __future__ import annotations

from enum import StrEnum


class Capability(StrEnum):
    """One thing a backend's replica group can do; every backend declares each, or says why not."""

    SYNCHRONISED_STEP = "synchronised-step"
    LOCAL_STEP = "local-step"
    GRADIENTS = "gradients"
    NAMED_STATE = "named-state"
    AVERAGE_PARAMETERS = "average-parameters"
    ALL_REDUCE = "all-reduce"
    ALL_GATHER = "all-gather"
    BROADCAST = "broadcast"
    REDUCE_SCATTER = "reduce-scatter"
    SEND_RECEIVE = "send-receive"
    COMPUTE = "compute"
    SUBGROUPS = "subgroups"
    BFLOAT16_EXCHANGE = "bfloat16-exchange"
    SERVED_STEP = "served-step"
