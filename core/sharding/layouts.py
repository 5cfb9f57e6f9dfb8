"""The parallel layout of sharded runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from isotrain.core.contracts.capabilities import Capabilities, Capability
from isotrain.core.contracts.device_mesh import DATA, SHARD, DeviceMesh
from isotrain.core.contracts.parallel_layout import REPLICATED, ParallelLayout
from isotrain.core.contracts.plan import hosts_of_size
from isotrain.core.errors import PlanError

if TYPE_CHECKING:
    from isotrain.core.contracts.adapter import Adapter
    from isotrain.core.contracts.plan import BackendConfig
    from isotrain.core.contracts.process import ProcessContext, ServerConnection
    from isotrain.core.contracts.replica_group import ReplicaGroup
    from isotrain.core.spec.training_spec import TrainingSpec


@dataclass(frozen=True)
class Hybrid:
    """Which replicas have a part each, and which have the same one.

    Attributes:
        host_size: So many consecutive replicas count as one host; None for the hosts that there are.
    """

    host_size: int | None = None

    def device_mesh(self, replicas: int, hosts: Sequence[Sequence[int]]) -> DeviceMesh:
        """Parts along the shard axis, inside a host; the same parts along the data axis.

        Args:
            replicas: In all.
            hosts: The replicas of each.

        Raises:
            PlanError: Hosts have other numbers of replicas, or these are numbered in no order.
        """
        wanted = tuple(map(tuple, hosts))
        if self.host_size is not None and replicas > 1:
            wanted = hosts_of_size("hybrid", replicas, self.host_size)
        if len(wanted) == 1:
            return DeviceMesh({SHARD: replicas})
        sizes = {len(host) for host in wanted}
        if len(sizes) > 1:
            told = ", ".join(str(len(host)) for host in wanted)
            raise PlanError(
                f"hybrid: {len(wanted)} hosts have {told} replicas, and the parts of one are to be those of"
                " the others. Start as many replicas on each, give a host_size, or leave hybrid out."
            )
        (size,) = sizes
        for axes in ({DATA: len(wanted), SHARD: size}, {SHARD: size, DATA: len(wanted)}):
            if DeviceMesh(axes).groups(SHARD) == wanted:
                return DeviceMesh(axes)
        raise PlanError(
            f"hybrid: the hosts have the replicas {', '.join(map(str, wanted))}. Have those of each host"
            " numbered one after the other, or one of each host in turn; or leave hybrid out."
        )


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


class AnyShardedLayout(ParallelLayout):
    """Every replica steps, and state lies in parts over all of them, or over those of each host."""

    def __init__(self, hybrid: Hybrid | None = None) -> None:
        """Says over whom.

        Args:
            hybrid: Over the replicas of each host; None: over all.
        """
        self._hybrid = hybrid

    def device_mesh(self, replicas: int) -> DeviceMesh:
        """All of them along the shard axis, unless a host is said to be smaller."""
        return self.device_mesh_on_hosts(replicas, [range(replicas)])

    def device_mesh_on_hosts(self, replicas: int, hosts: Sequence[Sequence[int]]) -> DeviceMesh:
        """Those of a host along the shard axis where the parts lie there, else all."""
        if self._hybrid is None:
            return DeviceMesh({SHARD: replicas})
        return self._hybrid.device_mesh(replicas, hosts)


class ShardedLayout(AnyShardedLayout):
    """Every replica steps, updates a part of the weights, and has optimizer slots for that part alone."""

    name = "sharded"


class FullyShardedLayout(AnyShardedLayout):
    """Every replica steps, and holds a part of each weight, of its gradient and of its slots."""

    name = "fully-sharded"

    def __init__(self, unit_bytes: int, hybrid: Hybrid | None = None) -> None:
        """Says how much is whole at once, and over whom the parts lie.

        Args:
            unit_bytes: Of weights that are joined together, where the model's modules allow it.
            hybrid: Over the replicas of each host; None: over all.
        """
        super().__init__(hybrid)
        self._unit_bytes = unit_bytes

    def for_replicas(self, replicas: int) -> ParallelLayout:
        """A single replica has all."""
        return self if replicas > 1 else REPLICATED

    def open(
        self,
        adapter: Adapter,
        spec: TrainingSpec,
        backend_config: BackendConfig,
        context: ProcessContext,
        server_connection: ServerConnection | None = None,
    ) -> ReplicaGroup:
        """Joins the run with a part of the state."""
        return adapter.start_fully_sharded(spec, backend_config, context, self._unit_bytes)
