"""Parameter-server runs over TCP, for adapters whose backend has no parameter server of its own."""

from __future__ import annotations

from typing import TYPE_CHECKING

from isotrain.core.contracts.adapter import Adapter
from isotrain.core.errors import UnsupportedError

if TYPE_CHECKING:
    from isotrain.core.contracts.plan import BackendConfig
    from isotrain.core.contracts.process import ServerConnection
    from isotrain.core.contracts.replica_group import ReplicaGroup
    from isotrain.core.spec.training_spec import TrainingSpec


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
        from isotrain.core.parameter_server.coordinator import tcp_coordinator_group

        return tcp_coordinator_group(
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
