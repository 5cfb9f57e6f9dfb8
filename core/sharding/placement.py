"""The placement of sharded runs."""

from __future__ import annotations

from collections.abc import Sequence

from isotrain.core.contracts.mesh import SHARD, Mesh
from isotrain.core.contracts.placement import Placement
from isotrain.core.sharding.hybrid import Hybrid


class InParts(Placement):
    """Every replica steps, and state lies in parts over all of them, or over those of each host."""

    def __init__(self, hybrid: Hybrid | None = None) -> None:
        """Says over whom.

        Args:
            hybrid: Over the replicas of each host; None: over all.
        """
        self._hybrid = hybrid

    def mesh(self, replicas: int) -> Mesh:
        """All of them along the shard axis, unless a host is said to be smaller."""
        return self.mesh_on(replicas, [range(replicas)])

    def mesh_on(self, replicas: int, hosts: Sequence[Sequence[int]]) -> Mesh:
        """Those of a host along the shard axis where the parts lie there, else all."""
        if self._hybrid is None:
            return Mesh({SHARD: replicas})
        return self._hybrid.mesh(replicas, hosts)


class Sharded(InParts):
    """Every replica steps, updates a part of the weights, and has optimizer slots for that part alone."""

    name = "sharded"
