"""Parallel layouts of sharded runs: ZeRO stages 1 and 2, fully sharded (FSDP), hybrid."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from isotrain.core.contracts.backend.adapter_protocols import FullyShardedBackend
from isotrain.core.contracts.backend.capabilities import Capabilities, Capability
from isotrain.core.contracts.backend.protocol_checks import require
from isotrain.core.contracts.device_mesh import DATA, SHARD, DeviceMesh
from isotrain.core.contracts.parallel_layout import REPLICATED, ParallelLayout
from isotrain.core.contracts.plan import hosts_of_size
from isotrain.core.errors import PlanError

if TYPE_CHECKING:
    from isotrain.core.contracts.backend.adapter import Adapter
    from isotrain.core.contracts.backend.replica_group import ReplicaGroup
    from isotrain.core.contracts.plan import BackendConfig
    from isotrain.core.contracts.process import ProcessContext, ServerConnection
    from isotrain.core.spec.training_spec import TrainingSpec


@dataclass(frozen=True)
class Hybrid:
    """Hybrid sharding: sharded over the replicas of each host, replicated over hosts.

    Attributes:
        host_size: Number of consecutive replicas to treat as one host; None for the real hosts.
    """

    host_size: int | None = None

    def device_mesh(self, replicas: int, hosts: Sequence[Sequence[int]]) -> DeviceMesh:
        """A mesh with the shard axis inside each host, and the data axis across hosts.

        Args:
            replicas: Number of replicas in all.
            hosts: Replicas of each host.

        Raises:
            PlanError: Hosts have different numbers of replicas, or replicas are numbered in no regular order.
        """
        groups = tuple(map(tuple, hosts))
        if self.host_size is not None and replicas > 1:
            groups = hosts_of_size("hybrid", replicas, self.host_size)
        if len(groups) == 1:
            return DeviceMesh({SHARD: replicas})
        sizes = {len(host) for host in groups}
        if len(sizes) > 1:
            counts = ", ".join(str(len(host)) for host in groups)
            raise PlanError(
                f"hybrid: {len(groups)} hosts have {counts} replicas, but each host needs the same number of"
                " shards. Start equally many replicas on each, give a host_size, or leave hybrid out."
            )
        (size,) = sizes
        for axes in ({DATA: len(groups), SHARD: size}, {SHARD: size, DATA: len(groups)}):
            if DeviceMesh(axes).groups(SHARD) == groups:
                return DeviceMesh(axes)
        raise PlanError(
            f"hybrid: the hosts have the replicas {', '.join(map(str, groups))}; expected consecutive ranks"
            " on each host, or hosts in turn (round robin). Renumber them, or leave hybrid out."
        )


_INHERITED = frozenset(
    {
        Capability.GRADIENTS,
        Capability.APPLY_GRADIENTS,
        Capability.NAMED_STATE,
        Capability.SEND_RECEIVE,
        Capability.COMPUTE,
        Capability.SUBGROUPS,
        Capability.BFLOAT16_COLLECTIVES,
        Capability.ORDERED_SUMS,
        Capability.ASYNCHRONOUS_COLLECTIVES,
    }
)
"""Capabilities of sharded groups wherever replicated groups have them."""
_SHARDED_ONLY = frozenset({Capability.UPDATE_SHARD, Capability.REDUCE_SCATTER_GRADIENTS})
_UPDATES_ALL_WEIGHTS = (
    Capability.SYNCHRONOUS_STEP,
    Capability.LOCAL_STEP,
    Capability.AVERAGE_PARAMETERS,
)
"""Capabilities that need a replica that updates all weights."""


def sharded_group(replicated: Capabilities) -> Capabilities:
    """Capabilities of groups whose replicas each update a shard, from those of replicated groups."""
    reason = "each replica updates only its shard of the weights"
    has = (replicated.has & _INHERITED) | _SHARDED_ONLY
    reasons = {**replicated.lacks, **dict.fromkeys(_UPDATES_ALL_WEIGHTS, reason)}
    return Capabilities(has, {name: why for name, why in reasons.items() if name not in has})


class AnyShardedLayout(ParallelLayout):
    """Every replica steps; state is sharded over all replicas, or over those of each host."""

    def __init__(self, hybrid: Hybrid | None = None) -> None:
        """Keeps whether to shard over the replicas of each host; None shards over all replicas."""
        self._hybrid = hybrid

    def device_mesh(self, replicas: int) -> DeviceMesh:
        """A mesh as if all replicas were on one host."""
        return self.device_mesh_on_hosts(replicas, [range(replicas)])

    def device_mesh_on_hosts(self, replicas: int, hosts: Sequence[Sequence[int]]) -> DeviceMesh:
        """All replicas along the shard axis; if hybrid, those of each host."""
        if self._hybrid is None:
            return DeviceMesh({SHARD: replicas})
        return self._hybrid.device_mesh(replicas, hosts)


class ShardedLayout(AnyShardedLayout):
    """ZeRO stage 1 or 2: each replica updates a shard of the weights, with optimizer state for it alone."""

    name = "sharded"


class FullyShardedLayout(AnyShardedLayout):
    """ZeRO stage 3 (FSDP): each replica holds a shard of every weight, gradient and optimizer state."""

    name = "fully-sharded"

    def __init__(self, unit_bytes: int, hybrid: Hybrid | None = None) -> None:
        """Keeps the unit size and the sharding group.

        Args:
            unit_bytes: Bytes of weights to unshard together, where the model's modules allow it.
            hybrid: Shards over the replicas of each host; None shards over all replicas.
        """
        super().__init__(hybrid)
        self._unit_bytes = unit_bytes

    def for_replicas(self, replicas: int) -> ParallelLayout:
        """The replicated layout for a single replica."""
        return self if replicas > 1 else REPLICATED

    def open(
        self,
        adapter: Adapter,
        spec: TrainingSpec,
        backend_config: BackendConfig,
        context: ProcessContext,
        server_connection: ServerConnection | None = None,
    ) -> ReplicaGroup:
        """Opens a group that holds a shard of the state."""
        backend = require(adapter, FullyShardedBackend)
        return backend.start_fully_sharded(spec, backend_config, context, self._unit_bytes)
