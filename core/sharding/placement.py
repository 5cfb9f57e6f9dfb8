"""The parallel layout of sharded runs."""

from __future__ import annotations

from collections.abc import Sequence

from isotrain.core.contracts.mesh import SHARD, DeviceMesh
from isotrain.core.contracts.placement import ParallelLayout
from isotrain.core.sharding.hybrid import Hybrid


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
