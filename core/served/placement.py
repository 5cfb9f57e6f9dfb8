"""The placement of served runs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from isotrain.core.contracts.mesh import DATA, Mesh
from isotrain.core.contracts.placement import REPLICATED, Placement, Seat

if TYPE_CHECKING:
    from isotrain.core.contracts.adapter import Adapter
    from isotrain.core.contracts.group import ReplicaGroup
    from isotrain.core.contracts.plan import Setting
    from isotrain.core.contracts.process import ProcessContext
    from isotrain.core.contracts.service import Service
    from isotrain.core.spec.training_spec import TrainingSpec


class Served(Placement):
    """The process of rank 0 holds weights, optimizer and loop; one more for each replica works for it."""

    name = "served"
    doors = 1

    def __init__(self, servers: int = 1) -> None:
        """Spreads the parameters.

        Args:
            servers: Over how many processes, where the backend has such.
        """
        self.servers = servers

    def for_replicas(self, replicas: int) -> Placement:
        """A single replica needs nobody to serve it."""
        return self if replicas > 1 else REPLICATED

    def mesh(self, replicas: int) -> Mesh:
        """The workers along the data axis."""
        return Mesh({DATA: replicas})

    def seats(self, adapter: Adapter, replicas: int) -> tuple[Seat, ...]:
        """The coordinator, a worker for each replica, and servers."""
        everyone = tuple(range(replicas))
        workers = (Seat((replica,), "worker") for replica in everyone)
        servers = [Seat((), "server")] * adapter.servers(self.servers)
        return (Seat(everyone, "coordinator"), *workers, *servers)

    def collective(self, adapter: Adapter, resolved: str) -> str:
        """With what workers and coordinator exchange."""
        return adapter.served_over

    def open(
        self,
        adapter: Adapter,
        spec: TrainingSpec,
        setting: Setting,
        context: ProcessContext,
        service: Service | None = None,
    ) -> ReplicaGroup:
        """Opens the coordinator's group."""
        assert service is not None, "a served run has several processes, which are launched"
        return adapter.start_served(spec, setting, service)

    def serve(
        self, adapter: Adapter, spec: TrainingSpec, setting: Setting, service: Service
    ) -> None:
        """Does what a worker or a server does."""
        adapter.serve(spec, setting, service)
