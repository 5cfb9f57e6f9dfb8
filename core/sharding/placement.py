"""The placement of sharded runs."""

from __future__ import annotations

from isotrain.core.contracts.mesh import SHARD, Mesh
from isotrain.core.contracts.placement import Placement


class Sharded(Placement):
    """Every replica steps, updates a part of the weights, and has optimizer slots for that part alone."""

    name = "sharded"

    def mesh(self, replicas: int) -> Mesh:
        """All of them along the shard axis."""
        return Mesh({SHARD: replicas})
