"""Declarations of a backend: the capabilities of its replica groups, and whether it is available here."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from types import MappingProxyType


class Capability(StrEnum):
    """A capability that strategies require and backends declare, or give a reason for the lack of."""

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
    DELAYED_UPDATES = "delayed-updates"
    UNSHARD_WEIGHTS = "unshard-weights"
    HYBRID_SHARDING = "hybrid-sharding"
    ORDERED_SUMS = "ordered-sums"
    ASYNCHRONOUS_COLLECTIVES = "asynchronous-collectives"


_NOT_REPLICATED = {
    Capability.PARAMETER_SERVER_STEP: "only a strategy of parallel layout `parameter-server` has workers",
    **dict.fromkeys(
        (Capability.UPDATE_SHARD, Capability.REDUCE_SCATTER_GRADIENTS),
        "only a strategy of parallel layout `sharded` shards the optimizer state",
    ),
    **dict.fromkeys(
        (Capability.PIPELINE_STEP, Capability.DELAYED_UPDATES),
        "only a strategy of parallel layout `pipeline` has stages",
    ),
    **dict.fromkeys(
        (Capability.UNSHARD_WEIGHTS, Capability.HYBRID_SHARDING), "each replica has all weights"
    ),
}
"""Reasons why groups of the parallel layout `replicated` lack the capabilities of other layouts."""
_BFLOAT16 = "the backend does not declare that its collectives sum bfloat16"
_ORDERED_SUMS = "the backend does not declare that it leaves sums over micro-batches to isotrain"
_SYNCHRONOUS = "its collectives return when they are done"
_UNDECLARED = "the backend does not declare it"


@dataclass(frozen=True)
class Capabilities:
    """Capabilities of a backend's replica groups under one parallel layout.

    Attributes:
        has: Supported capabilities. Any other is unsupported, also one that a later isotrain adds.
        lacks: Unsupported capability to the reason.
    """

    has: frozenset[Capability] = frozenset()
    lacks: Mapping[Capability, str] = field(default_factory=dict)

    @classmethod
    def only(cls, has: Collection[Capability], reason: str) -> Capabilities:
        """These capabilities; all others are missing for the same reason."""
        return cls(frozenset(has), {each: reason for each in Capability if each not in has})

    @classmethod
    def none(cls, reason: str) -> Capabilities:
        """No capabilities, all for the same reason."""
        return cls.only((), reason)

    def with_changes(
        self,
        *,
        has: Collection[Capability] = (),
        lacks: Mapping[Capability, str] = MappingProxyType({}),
    ) -> Capabilities:
        """These capabilities with some more, and some less.

        Args:
            has: Further capabilities.
            lacks: Capability that is missing after all, to the reason.
        """
        changed = self.has.union(has).difference(lacks)
        reasons = {**self.lacks, **lacks}
        return Capabilities(changed, {n: why for n, why in reasons.items() if n not in changed})

    def missing(self, needed: Collection[Capability]) -> list[str]:
        """Unsupported ones among the needed capabilities: one text for each reason."""
        by_reason: dict[str, list[str]] = {}
        for capability in sorted(set(needed) - self.has):
            by_reason.setdefault(self.lacks.get(capability, _UNDECLARED), []).append(capability)
        return [f"no {', '.join(names)}: {reason}" for reason, names in by_reason.items()]


REPLICATED_CAPABILITIES = Capabilities(
    frozenset(
        {
            Capability.SYNCHRONOUS_STEP,
            Capability.LOCAL_STEP,
            Capability.GRADIENTS,
            Capability.APPLY_GRADIENTS,
            Capability.NAMED_STATE,
            Capability.AVERAGE_PARAMETERS,
            Capability.SEND_RECEIVE,
            Capability.COMPUTE,
            Capability.SUBGROUPS,
        }
    ),
    _NOT_REPLICATED
    | {
        Capability.BFLOAT16_COLLECTIVES: _BFLOAT16,
        Capability.ORDERED_SUMS: _ORDERED_SUMS,
        Capability.ASYNCHRONOUS_COLLECTIVES: _SYNCHRONOUS,
    },
)
"""Capabilities of every backend's groups under layout `replicated`: what the required methods give."""


@dataclass(frozen=True)
class Availability:
    """Whether a backend, a collective, a launcher or a logger can be used on this machine.

    Attributes:
        available: Whether it can be used.
        version: Installed version of the framework or library; None where not installed.
        reason: Reason why it is not available; if it is, its limits here, or None.
        hint: Advice on what the user can do about the reason.
    """

    available: bool
    version: str | None = None
    reason: str | None = None
    hint: str | None = None


@dataclass(frozen=True)
class Examination:
    """Result of loading a backend in a subprocess, as `isotrain doctor` does.

    Attributes:
        backend: Availability of the backend.
        collectives: Collective name to its availability.
        versions: Package name to installed version.
    """

    backend: Availability
    collectives: Mapping[str, Availability] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=dict)
