"""Parallel layout of parameter-server runs, and the adapter mixin for backends without own servers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from isotrain.core.contracts.backend.adapter import Adapter
from isotrain.core.contracts.backend.adapter_protocols import RECORDED, ParameterServerBackend
from isotrain.core.contracts.backend.capabilities import Capabilities, Capability
from isotrain.core.contracts.backend.protocol_checks import require
from isotrain.core.contracts.device_mesh import DATA, DeviceMesh
from isotrain.core.contracts.parallel_layout import REPLICATED, ParallelLayout
from isotrain.core.contracts.process import ProcessInfo, rank_of
from isotrain.core.errors import UnsupportedError

if TYPE_CHECKING:
    from isotrain.core.contracts.backend.replica_group import ReplicaGroup
    from isotrain.core.contracts.plan import BackendConfig
    from isotrain.core.contracts.process import ProcessContext, ServerConnection
    from isotrain.core.spec.training_spec import TrainingSpec


PARAMETER_SERVER_CAPABILITIES = Capabilities.only(
    {
        Capability.PARAMETER_SERVER_STEP,
        Capability.SYNCHRONOUS_STEP,
        Capability.GRADIENTS,
        Capability.NAMED_STATE,
    },
    "one process holds the parameters, and no replica steps or communicates by itself",
)


class ParameterServerLayout(ParallelLayout):
    """Parallel layout `parameter-server`: rank 0, the coordinator, has weights, optimizer and training loop.

    One worker for each replica computes gradients; some backends have servers that hold the parameters.
    """

    name = "parameter-server"
    extra_ports = 1

    def __init__(self, servers: int = 1) -> None:
        """Keeps the number of processes that hold the parameters, for backends with servers."""
        self.servers = servers

    def for_replicas(self, replicas: int) -> ParallelLayout:
        """Layout for a number of replicas: a single one is `replicated`, without a parameter server."""
        return self if replicas > 1 else REPLICATED

    def device_mesh(self, replicas: int) -> DeviceMesh:
        """Device mesh with the workers along the data axis."""
        return DeviceMesh({DATA: replicas})

    def processes(self, adapter: Adapter, replicas: int) -> tuple[ProcessInfo, ...]:
        """The coordinator, a worker for each replica, and servers."""
        all_replicas = tuple(range(replicas))
        workers = (
            ProcessInfo(rank_of(replica), replicas=(replica,), role="worker")
            for replica in all_replicas
        )
        first_server = 1 + replicas
        count = require(adapter, ParameterServerBackend).servers(self.servers)
        servers = (ProcessInfo(first_server + index, role="server") for index in range(count))
        return (ProcessInfo(0, replicas=all_replicas, role="coordinator"), *workers, *servers)

    def collective(self, adapter: Adapter, resolved: str) -> str:
        """Transport between workers and coordinator."""
        return adapter.parameter_server_transport

    def open(
        self,
        adapter: Adapter,
        spec: TrainingSpec,
        backend_config: BackendConfig,
        context: ProcessContext,
        server_connection: ServerConnection | None = None,
    ) -> ReplicaGroup:
        """Opens the coordinator's group."""
        assert server_connection is not None, (
            "a parameter-server run has several processes, which are launched"
        )
        backend = require(adapter, ParameterServerBackend)
        return backend.start_parameter_server(spec, backend_config, server_connection)

    def serve(
        self,
        adapter: Adapter,
        spec: TrainingSpec,
        backend_config: BackendConfig,
        server_connection: ServerConnection,
    ) -> None:
        """Runs a worker or a server."""
        require(adapter, ParameterServerBackend).serve(spec, backend_config, server_connection)


class TcpParameterServer(Adapter):
    """Adapter mixin: parameter-server runs over authenticated TCP.

    The coordinator holds the parameters and sends them to the workers. Each process makes a group of one
    replica by `start`.
    """

    parameter_server_transport = "tcp"

    def servers(self, requested: int) -> int:
        """Zero: rank 0 holds the parameters.

        Raises:
            UnsupportedError: More than one server is requested.
        """
        if requested > 1:
            raise UnsupportedError(
                f"backend {self.name!r} keeps the parameters of a parameter-server run in rank 0, and cannot"
                f" spread them over {requested} servers."
            )
        return 0

    def start_parameter_server(
        self, spec: TrainingSpec, backend_config: BackendConfig, server_connection: ServerConnection
    ) -> ReplicaGroup:
        from isotrain.core.parameter_server.coordinator import (
            recorded_coordinator_group,
            tcp_coordinator_group,
        )

        is_recorded = backend_config.collective == RECORDED
        start_group = recorded_coordinator_group if is_recorded else tcp_coordinator_group
        return start_group(
            server_connection,
            lambda: self.start(spec, backend_config, server_connection.single_replica_context()),
        )

    def serve(
        self, spec: TrainingSpec, backend_config: BackendConfig, server_connection: ServerConnection
    ) -> None:
        from isotrain.core.parameter_server.worker import serve

        serve(
            server_connection,
            lambda: self.start(spec, backend_config, server_connection.single_replica_context()),
        )
