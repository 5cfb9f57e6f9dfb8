"""The contract of a parallel layout: how weights and optimizer state are laid out over processes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

from isotrain.core.contracts.device_mesh import DATA, DeviceMesh
from isotrain.core.contracts.process import ProcessInfo
from isotrain.core.errors import UnsupportedError

if TYPE_CHECKING:
    from isotrain.core.contracts.backend.adapter import Adapter
    from isotrain.core.contracts.backend.replica_group import ReplicaGroup
    from isotrain.core.contracts.plan import BackendConfig
    from isotrain.core.contracts.process import ProcessContext, ServerConnection
    from isotrain.core.spec.training_spec import TrainingSpec


class ParallelLayout(ABC):
    """Assigns replicas, roles and a device mesh to the processes of a run, and opens each one's group.

    Every strategy has one, made by the strategy's constructor if it depends on options. It is equal on all
    processes, and reaches the backend through the adapter only.

    Attributes:
        name: Name under which backends declare their capabilities for it.
        extra_ports: Number of ports that the run needs besides one per process.
    """

    name: ClassVar[str]
    extra_ports: int = 0

    @property
    def message_prefix(self) -> str:
        """Beginning of messages about what groups of this layout lack."""
        return f"in {self.name} runs "

    def for_replicas(self, replicas: int) -> ParallelLayout:
        """Parallel layout for a number of replicas; a single replica may need a simpler one."""
        return self

    @abstractmethod
    def device_mesh(self, replicas: int) -> DeviceMesh:
        """Device mesh of a run with this number of replicas.

        Raises:
            PlanError: The layout does not support this number.
        """

    def device_mesh_on_hosts(self, replicas: int, hosts: Sequence[Sequence[int]]) -> DeviceMesh:
        """Device mesh of a run whose hosts are known; by default the same for all hosts.

        Args:
            replicas: Number of replicas in the run.
            hosts: Replica indices of each host.

        Raises:
            PlanError: The layout does not support these hosts.
        """
        return self.device_mesh(replicas)

    def processes(self, adapter: Adapter, replicas: int) -> tuple[ProcessInfo, ...]:
        """Rank, replicas and role of each process, by rank; the plan sets the hosts.

        By default processes with one replica each, or all in one.

        Raises:
            UnsupportedError: The backend does not support the roles.
        """
        indices = tuple(range(replicas))
        if adapter.replicas_per_process == "all":
            return (ProcessInfo(0, replicas=indices),)
        return tuple(ProcessInfo(replica, replicas=(replica,)) for replica in indices)

    def collective(self, adapter: Adapter, resolved: str) -> str:
        """Name of the collective or transport that replicas communicate by.

        Args:
            adapter: Adapter of the backend.
            resolved: Collective that the backend resolved.
        """
        return resolved

    def open(
        self,
        adapter: Adapter,
        spec: TrainingSpec,
        backend_config: BackendConfig,
        context: ProcessContext,
        server_connection: ServerConnection | None = None,
    ) -> ReplicaGroup:
        """Opens the replica group of this process. Collective: called once by every process with a session.

        Args:
            adapter: Adapter of the backend.
            spec: Training spec.
            backend_config: Backend settings that the plan resolved.
            context: Process context of this process.
            server_connection: Key and timeouts of a parameter-server run; None in other runs.
        """
        return adapter.start(spec, backend_config, context)

    def serve(
        self,
        adapter: Adapter,
        spec: TrainingSpec,
        backend_config: BackendConfig,
        server_connection: ServerConnection,
    ) -> None:
        """Runs a process without a session, such as a parameter server, until the coordinator has left.

        Raises:
            UnsupportedError: The layout has no such processes.
        """
        raise UnsupportedError(
            f"parallel layout {self.name!r} has no process of role {server_connection.context.role!r}."
        )


class ReplicatedLayout(ParallelLayout):
    """Data parallelism: every replica holds all weights and optimizer state."""

    name = "replicated"
    message_prefix = ""

    def device_mesh(self, replicas: int) -> DeviceMesh:
        """One-dimensional mesh along the data axis."""
        return DeviceMesh({DATA: replicas})


REPLICATED = ReplicatedLayout()
