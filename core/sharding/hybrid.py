"""State in parts over the replicas of each host, and alike on all hosts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from isotrain.core.contracts.mesh import DATA, SHARD, DeviceMesh
from isotrain.core.contracts.plan import hosts_of_size
from isotrain.core.errors import PlanError


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
