"""What a strategy can ask of a backend, and a backend can declare."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from enum import StrEnum


class Capability(StrEnum):
    """One thing a backend's replica group can do; every backend declares each, or says why not."""

    SYNCHRONISED_STEP = "synchronised-step"
    LOCAL_STEP = "local-step"
    GRADIENTS = "gradients"
    APPLY = "apply"
    NAMED_STATE = "named-state"
    AVERAGE_PARAMETERS = "average-parameters"
    SEND_RECEIVE = "send-receive"
    COMPUTE = "compute"
    SUBGROUPS = "subgroups"
    BFLOAT16_EXCHANGE = "bfloat16-exchange"
    SERVED_STEP = "served-step"
    PARTIAL_UPDATE = "partial-update"
    GRADIENTS_IN_BUCKETS = "gradients-in-buckets"
    STAGED_STEP = "staged-step"
    GATHER_WEIGHTS = "gather-weights"
    WEIGHTS_IN_HOSTS = "weights-in-hosts"


NOT_REPLICATED = {
    Capability.SERVED_STEP: "only a strategy of placement `served` has workers",
    **dict.fromkeys(
        (Capability.PARTIAL_UPDATE, Capability.GRADIENTS_IN_BUCKETS),
        "only in a strategy of placement `sharded` has each replica its own part",
    ),
    Capability.STAGED_STEP: "only a strategy of placement `staged` has stages",
    **dict.fromkeys(
        (Capability.GATHER_WEIGHTS, Capability.WEIGHTS_IN_HOSTS), "each replica has all weights"
    ),
}
"""Why no replicated group has what others have."""
_UNDECLARED = "the backend does not declare it"


@dataclass(frozen=True)
class Capabilities:
    """What the replica groups of one placement can do under a backend.

    Attributes:
        has: What they can do; what is not in it they cannot, also a capability of a later isotrain.
        lacks: Why they cannot do the others.
    """

    has: frozenset[Capability] = frozenset()
    lacks: Mapping[Capability, str] = field(default_factory=dict)

    @classmethod
    def none(cls, reason: str) -> Capabilities:
        """Of a backend that has no such groups at all."""
        return cls(lacks=dict.fromkeys(Capability, reason))

    def missing(self, needed: Collection[Capability]) -> list[str]:
        """Says for which reasons which of the needed capabilities are not there."""
        by_reason: dict[str, list[str]] = {}
        for capability in sorted(set(needed) - self.has):
            by_reason.setdefault(self.lacks.get(capability, _UNDECLARED), []).append(capability)
        return [f"no {', '.join(names)}: {reason}" for reason, names in by_reason.items()]
