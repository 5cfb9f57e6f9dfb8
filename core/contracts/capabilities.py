"""What a strategy can ask of a backend, and a backend can declare."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from enum import StrEnum


class Capability(StrEnum):
    """One thing a backend's replica group can do; every backend declares each, or says why not."""

    SYNCHRONOUS_STEP = "synchronous-step"
    LOCAL_STEP = "local-step"
    GRADIENTS = "gradients"
    APPLY_GRADIENTS = "apply-gradients"
    NAMED_STATE = "named-state"
    AVERAGE_PARAMETERS = "average-parameters"
    SEND_RECEIVE = "send-receive"
    COMPUTE = "compute"
    SUBGROUPS = "subgroups"
    BFLOAT16_COLLECTIVES = "bfloat16-collectives"
    PARAMETER_SERVER_STEP = "parameter-server-step"
    UPDATE_SHARD = "update-shard"
    REDUCE_SCATTER_GRADIENTS = "reduce-scatter-gradients"
    PIPELINE_STEP = "pipeline-step"
    UNSHARD_WEIGHTS = "unshard-weights"
    HYBRID_SHARDING = "hybrid-sharding"


NOT_REPLICATED = {
    Capability.PARAMETER_SERVER_STEP: "only a strategy of parallel layout `parameter-server` has workers",
    **dict.fromkeys(
        (Capability.UPDATE_SHARD, Capability.REDUCE_SCATTER_GRADIENTS),
        "only in a strategy of parallel layout `sharded` has each replica its own part",
    ),
    Capability.PIPELINE_STEP: "only a strategy of parallel layout `pipeline` has stages",
    **dict.fromkeys(
        (Capability.UNSHARD_WEIGHTS, Capability.HYBRID_SHARDING), "each replica has all weights"
    ),
}
"""Why no replicated group has what others have."""
_UNDECLARED = "the backend does not declare it"


@dataclass(frozen=True)
class Capabilities:
    """What the replica groups of one parallel layout can do under a backend.

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


@dataclass(frozen=True)
class Availability:
    """Whether a backend, one of its collectives, a launcher or a logger can be used here.

    Attributes:
        available: True when it can.
        version: Of the framework or library, when installed.
        reason: Why not, when not usable; else what it cannot do here, if there is something.
        hint: What to do about it.
    """

    available: bool
    version: str | None = None
    reason: str | None = None
    hint: str | None = None


@dataclass(frozen=True)
class Examination:
    """What `doctor` found by really loading a backend.

    Attributes:
        backend: Availability of the backend as a whole.
        collectives: Availability of each of its collectives.
        versions: Versions of every package it uses.
    """

    backend: Availability
    collectives: Mapping[str, Availability] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=dict)
