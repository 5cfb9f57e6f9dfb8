"""The contract of a parallel layout: how the state of a run lies over its processes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from isotrain.core.contracts.device_mesh import DATA, DeviceMesh
from isotrain.core.contracts.process import Role
from isotrain.core.errors import UnsupportedError

if TYPE_CHECKING:
    from isotrain.core.contracts.adapter import Adapter
    from isotrain.core.contracts.plan import BackendConfig
    from isotrain.core.contracts.process import ProcessContext, ServerConnection
    from isotrain.core.contracts.replica_group import ReplicaGroup
    from isotrain.core.spec.training_spec import TrainingSpec


@dataclass(frozen=True)
class ProcessRole:
    """What one process of a run is there for.

    Attributes:
        replicas: That live in it.
        role: What it does.
    """

    replicas: tuple[int, ...]
    role: Role = "replica"


class ParallelLayout(ABC):
    """Lays out the processes of a run, and opens the group of each.

    A strategy has one; where it depends on options, the strategy's constructor makes it. It is the same on
    every process, and knows no backend: what it asks of one goes through the adapter.

    Attributes:
        name: Under which backends declare what their groups of it can do.
        extra_ports: Ports that its processes need besides one for each.
    """

    name: ClassVar[str]
    extra_ports: int = 0

    @property
    def message_prefix(self) -> str:
        """How texts begin that are about groups of it."""
        return f"in {self.name} runs "

    def for_replicas(self, replicas: int) -> ParallelLayout:
        """The parallel layout of a run of so many: a single replica may need no other."""
        return self

    @abstractmethod
    def device_mesh(self, replicas: int) -> DeviceMesh:
        """The places of a run of so many replicas.

        Raises:
            PlanError: So many do not fit.
        """

    def device_mesh_on_hosts(self, replicas: int, hosts: Sequence[Sequence[int]]) -> DeviceMesh:
        """The places of a run whose hosts are known; by default those of any hosts.

        Args:
            replicas: In all.
            hosts: The replicas of each.

        Raises:
            PlanError: They do not fit.
        """
        return self.device_mesh(replicas)

    def process_roles(self, adapter: Adapter, replicas: int) -> tuple[ProcessRole, ...]:
        """What each process is there for, by rank: by default to hold as many replicas as the backend says.

        Raises:
            UnsupportedError: The backend has no such processes.
        """
        everyone = tuple(range(replicas))
        if adapter.replicas_per_process == "all":
            return (ProcessRole(everyone),)
        return tuple(ProcessRole((replica,)) for replica in everyone)

    def collective(self, adapter: Adapter, resolved: str) -> str:
        """What several replicas exchange with, where the backend has resolved a collective."""
        return resolved

    def open(
        self,
        adapter: Adapter,
        spec: TrainingSpec,
        backend_config: BackendConfig,
        context: ProcessContext,
        server_connection: ServerConnection | None = None,
    ) -> ReplicaGroup:
        """Joins the run; called once by every process that has a session.

        Args:
            adapter: Of the backend.
            spec: What to train.
            backend_config: What the plan resolved.
            context: This process's place.
            server_connection: What it is told besides; None in a session that nobody launched.
        """
        return adapter.start(spec, backend_config, context)

    def serve(
        self,
        adapter: Adapter,
        spec: TrainingSpec,
        backend_config: BackendConfig,
        server_connection: ServerConnection,
    ) -> None:
        """Does what a process without a session does; returns when those with one are through."""
        raise UnsupportedError(
            f"parallel layout {self.name!r} has no process of role {server_connection.context.role!r}."
        )


class ReplicatedLayout(ParallelLayout):
    """Every replica holds the weights, and steps."""

    name = "replicated"
    message_prefix = ""

    def device_mesh(self, replicas: int) -> DeviceMesh:
        """All of them along the data axis."""
        return DeviceMesh({DATA: replicas})


REPLICATED = ReplicatedLayout()
